"""Log probabilities of logits: values, the likeliest, and what is not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from minisgl.core import make_batch
from minisgl.engine import engine as engine_module
from minisgl.engine.logprobs import compute_logprobs, read_back
from minisgl.kernel.staging import Readback, Uploader
from tests.engine.parity import tiny_engine


def read(logits, tokens, num_top):
    return read_back([compute_logprobs(logits, tokens, num_top)], Readback(torch.device("cpu"))).read()


def test_values_are_those_of_a_plain_softmax():
    logits = torch.randn((5, 40), generator=torch.Generator().manual_seed(1)) * 5
    tokens = torch.tensor([0, 39, 7, 7, 20])
    for row, entry in enumerate(read(logits, tokens, [6] * 5)):
        total = math.log(sum(math.exp(value) for value in logits[row].tolist()))
        plain = [value - total for value in logits[row].tolist()]
        order = sorted(range(40), key=lambda token, plain=plain: -plain[token])[:6]
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(plain[entry.token_id], abs=1e-5)
        assert entry.top_ids == tuple(order)
        assert entry.top_logprobs == pytest.approx([plain[token] for token in order], abs=1e-5)


def test_each_row_gets_as_many_of_the_likeliest_as_it_asked_for():
    entries = read(torch.randn((3, 30)), torch.zeros(3, dtype=torch.int64), [0, 2, 5])
    assert [len(entry.top_ids) for entry in entries] == [0, 2, 5]
    assert [len(entry.top_logprobs) for entry in entries] == [0, 2, 5]


def test_none_of_the_likeliest_may_be_asked_for_and_more_than_there_are():
    logits = torch.randn((1, 4))
    assert read(logits, torch.tensor([2]), [0])[0].top_ids == ()
    assert sorted(read(logits, torch.tensor([2]), [20])[0].top_ids) == [0, 1, 2, 3]


def test_what_is_not_finite_is_none():
    logits = torch.tensor([[0.0, float("-inf"), 1.0], [float("nan"), 0.0, 0.0], [float("inf"), 0.0, 0.0]])
    entries = read(logits, torch.tensor([1, 1, 1]), [3, 3, 3])
    assert [entry.logprob for entry in entries] == [None, None, None]
    values = [value for entry in entries for value in (entry.logprob, *entry.top_logprobs)]
    assert all(value is None or math.isfinite(value) for value in values)
    assert entries[0].top_ids == (2, 0, 1)
    assert entries[0].top_logprobs[2] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_normalised_in_fp32(dtype):
    logits = (torch.randn((4, 5000), generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    tokens = torch.tensor([1, 2, 3, 4])
    ours = [entry.logprob for entry in read(logits, tokens, [0] * 4)]
    assert ours == pytest.approx(logits.double().log_softmax(-1)[torch.arange(4), tokens].tolist(), abs=1e-5)


def test_pieces_of_unlike_widths_come_back_together_and_in_order():
    logits = torch.randn((5, 30))
    tokens = torch.arange(5)
    pieces = [(logits[:2], tokens[:2], [3, 1]), (logits[2:], tokens[2:], [0, 0, 0])]
    entries = read_back([compute_logprobs(*piece) for piece in pieces], Readback(torch.device("cpu"))).read()
    assert entries == [entry for piece in pieces for entry in read(*piece)]
    assert [entry.token_id for entry in entries] == [0, 1, 2, 3, 4]


def test_nothing_is_read_where_nothing_is_wanted():
    assert read_back([], Readback(torch.device("cpu"))) is None


def test_a_step_makes_as_many_uploads_for_a_long_prompt_s_log_probabilities_as_for_a_short_one_s(tiny_models, monkeypatch):
    """Of those made behind the forward, a block is free when the step has been computed; the host would wait for it."""
    uploads = []

    class Counted(Uploader):
        def __call__(self, *arrays):
            uploads.append(arrays)
            return super().__call__(*arrays)

    monkeypatch.setattr(engine_module, "Uploader", Counted)
    engine = tiny_engine(tiny_models("llama"), num_pages=80)
    counts = []
    for length in (10, 600):
        positions, zero = np.arange(length, dtype=np.int32), np.zeros(1, dtype=np.int32)
        columns = np.arange(-(-length // 16), dtype=np.int32)
        arrays = {"slots": zero, "cached_lens": zero, "extend_lens": zero + length, "input_ids": positions % 50, "positions": positions}
        arrays |= {"write_slots": positions, "sample_rows": zero, "table_updates": np.stack((columns * 0, columns, columns), axis=1)}
        targets = np.stack((positions[:-1], positions[1:] % 50, positions[:-1] * 0 + 2), axis=1)
        uploads.clear()
        step = engine.submit(make_batch(0, (0,), arrays | {"prompt_targets": targets}))
        counts.append(len(uploads))
        step.read()
        entries = step.read_logprobs().prompt
        assert [entry.token_id for entry in entries] == (positions[1:] % 50).tolist()
        assert all(len(entry.top_ids) == 2 for entry in entries)
    uploads.clear()
    engine.submit(make_batch(1, (0,), arrays)).read()
    assert len(uploads) < counts[0] == counts[1] <= 6, "a step without targets uploads none"
