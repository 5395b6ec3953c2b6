"""The limits of top-k, top-p and min-p against the plain filters, which sort; and rows drawn again under them."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel.gpu.filter import Filters, find_limits
from minisgl.kernel.gpu.sampling import make_workspace, resample, sample
from minisgl.kernel.sampling import filter_logits, sample_plainly

slow = pytest.mark.slow
KINDS = ("normal", "equal values", "bf16", "half is -inf", "all equal", "wide")


def make_logits(kind, num_rows, vocab_size):
    logits = torch.randn(num_rows, vocab_size) * 3
    if kind == "equal values":
        return torch.randint(-3, 4, (num_rows, vocab_size)).float()
    if kind == "bf16":
        return logits.bfloat16()
    if kind == "half is -inf":
        logits[torch.rand(num_rows, vocab_size) < 0.5] = float("-inf")
        logits[:, 0] = 1
    if kind == "all equal":
        logits[:] = float(torch.randn(()))
    if kind == "wide":
        logits *= 10 ** torch.empty(num_rows, vocab_size).uniform_(-10, 3)
        logits[:, 1] = -1e30
    return logits


def random_filters(num_rows, vocab_size):
    off = torch.rand(3, num_rows) < 0.4
    top_k = torch.where(off[0], 0, torch.randint(1, vocab_size + 1, (num_rows,)))
    top_p = torch.where(off[1], 1.0, torch.rand(num_rows).clamp(1e-3, 0.999))
    min_p = torch.where(off[2], 0.0, torch.rand(num_rows) ** 3)
    return torch.empty(num_rows).uniform_(0.3, 2), top_k, top_p, min_p


def kept(logits, temperatures, top_k, top_p, min_p, num_ids=None, chunk=None, tokens=None):
    """[S, num_ids] bool; the rows' slots are in reverse order."""
    device, num_ids, num_rows = logits.device, num_ids or logits.shape[1], len(logits)
    columns = (torch.ones(num_rows, dtype=torch.int32), temperatures, top_k.int(), top_p, min_p)
    filters = Filters(*(column.flip(0).to(device) for column in columns))
    slots = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device=device)
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=device) if tokens is None else tokens
    limits = find_limits(logits, tokens, slots, filters, num_ids, chunk)
    logits, least = logits[:, :num_ids].float(), limits.least.unsqueeze(1)
    return ((logits > least) | ((logits == least) & (torch.arange(num_ids, device=device) <= limits.last_ids.unsqueeze(1)))).cpu()


def check(logits, found, temperatures, top_k, top_p, min_p):
    """As the plain filters keep in fp64; rows in which a sum of probabilities comes within its rounding of top-p may differ by a little."""
    scaled = (logits.float() / temperatures.unsqueeze(1)).double()
    expected = filter_logits(scaled, top_k, top_p.double(), min_p.double()) > float("-inf")
    found = found & (scaled > float("-inf"))
    for row in range(len(logits)):
        if not torch.equal(found[row], expected[row]):
            differing = (found[row] ^ expected[row]).nonzero()
            assert top_p[row] < 1 or min_p[row] > 0, "a number of tokens is exact"
            assert len(differing) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab_size", "chunk"), [(7, None), pytest.param(120, None, marks=slow), (140, 64)])
def test_what_is_kept_is_what_the_plain_filters_keep(device, kind, vocab_size, chunk):
    num_rows = 200 if device.type == "cuda" else 2
    logits, settings = make_logits(kind, num_rows, vocab_size), random_filters(num_rows, vocab_size)
    check(logits, kept(logits.to(device), *settings, chunk=chunk), *settings)


def test_values_that_the_temperature_makes_equal_to_the_last_stay(device):
    rising = (torch.tensor(1.7).view(torch.int32) + torch.arange(40, dtype=torch.int32)).view(torch.float32)
    logits = torch.stack((rising, -rising, rising[torch.randperm(40)]))
    temperatures = torch.tensor([1.3, 1.1, 1.3])
    scaled = logits / temperatures.unsqueeze(1)
    values = scaled.sort(dim=-1, descending=True).values
    top_k = (values[:, :-1] == values[:, 1:]).int().argmax(-1) + 1  # the next value is equal
    settings = (temperatures, top_k, torch.ones(3), torch.zeros(3))
    expected = filter_logits(scaled, *settings[1:]) > float("-inf")
    assert bool((expected.sum(-1) > top_k).all())
    assert torch.equal(kept(logits.to(device), *settings, chunk=32), expected)


@pytest.mark.parametrize("setting", [(1, 1.0, 0.0), (0, 1e-30, 0.0), (0, 1.0, 1.0), (3, 0.5, 0.1), (150, 0.5, 0.0), (0, 0.5, 0.0)])
def test_ties_are_kept_as_in_the_plain_filters(device, setting):
    """All of the last top-k value; of the last top-p value the lowest ids; all of the likeliest for min-p. Sums are exact here."""
    logits = torch.zeros(3, 160)
    logits[1, ::2] = -float("inf")
    logits[2, 40:48] = 30.0
    settings = (torch.ones(3), *(torch.tensor([value] * 3) for value in setting))
    expected = filter_logits(logits, *settings[1:]) > float("-inf")
    assert torch.equal(kept(logits.to(device), *settings, chunk=32) & (logits > float("-inf")), expected)


def test_rows_that_want_nothing_or_are_not_finite_are_left_alone(device):
    logits = torch.randn(4, 100)
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    tokens = torch.tensor([5, -1, -1, 7], device=device)
    top_k = torch.tensor([3, 3, 3, 0])
    found = kept(logits.to(device), torch.ones(4), top_k, torch.tensor([1, 0.5, 0.5, 1]), torch.zeros(4), tokens=tokens)
    logits[1, 3] = 0
    assert found.sum(-1).tolist()[0] == 3
    assert bool(found[3].all())
    assert int(found[1].sum()) == 99, "all but the NaN"
    banned = kept(logits[2:3].to(device), torch.ones(1), top_k[:1], torch.tensor([0.5]), torch.tensor([0.5]))
    assert banned.shape == (1, 100), "a row without any token ends"
    logits[2, :50] = float("inf")
    kept(logits[2:3].to(device), torch.ones(1), top_k[:1], torch.tensor([0.5]), torch.tensor([0.5]))


def test_padding_of_the_vocabulary_does_not_matter(device):
    logits, settings = torch.randn(3, 128), random_filters(3, 90)
    alone = kept(logits[:, :90].contiguous().to(device), *settings)
    logits[:, 90:] = 1000
    assert torch.equal(kept(logits.to(device), *settings, num_ids=90), alone)


@pytest.mark.parametrize(
    "setting", [(20, 0.95, 0.0), pytest.param((0, 0.9, 0.01), marks=slow), pytest.param((30_000, 0.7, 0.0), marks=slow)]
)
def test_a_whole_vocabulary(device, setting):
    logits = (torch.randn(1, 151_936) * 3).bfloat16()
    settings = (torch.tensor([0.6]), *(torch.tensor([value]) for value in setting))
    found = kept(logits.to(device), *settings, num_ids=151_669)
    scaled = logits[:, :151_669].double() / float(settings[0])
    expected = filter_logits(scaled, settings[1], settings[2].double(), settings[3].double()) > float("-inf")
    assert int((found ^ expected).sum()) <= (0 if setting[0] == 20 else 2)


def test_rows_are_drawn_again_from_what_is_kept(device):
    num_rows, vocab_size = 6, 140
    logits, (temperatures, top_k, top_p, min_p) = make_logits("normal", num_rows, vocab_size), random_filters(num_rows, vocab_size)
    is_wanted = torch.tensor([1, 0] * 3, dtype=torch.int32)
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (num_rows,)), torch.randint(0, 40_960, (num_rows,), dtype=torch.int32)
    slots = torch.arange(num_rows, dtype=torch.int32)
    filters = Filters(*(column.to(device) for column in (is_wanted, temperatures, top_k.int(), top_p, min_p)))
    workspace = make_workspace(num_rows, vocab_size, device, 128)
    there = [tensor.to(device) for tensor in (logits, temperatures, seeds, positions, slots)]
    tokens = sample(there[0], there[1], there[2], there[3], vocab_size, workspace, there[4])
    before = tokens.clone()
    tokens[4] = -1
    resample(tokens, there[0], there[4], there[3], filters, there[2], vocab_size, workspace)
    scaled = filter_logits(logits / temperatures.unsqueeze(1), top_k, top_p, min_p)
    expected = torch.where(is_wanted > 0, sample_plainly(scaled, seeds, positions.long()), before.cpu())
    expected[4] = -1
    assert tokens.tolist() == expected.tolist()
    assert not workspace.num_done.any(), "ready for the next call"
