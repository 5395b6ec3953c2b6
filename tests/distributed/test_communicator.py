"""Communicators: what several ranks exchange over gloo, and what one rank does without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.distributed import DistributedInfo, make_communicator
from minisgl.distributed.communicator import Communicator, SingleRank
from minisgl.distributed.groups import Groups
from minisgl.errors import ConfigError
from minisgl.layers.base import Spec
from minisgl.models.config import parse_model_config
from minisgl.models.decoder import CausalLM
from tests.distributed.rank import DTYPES, HIDDEN, SHAPES, VOCAB, compute, values
from tests.models.small import LLAMA, MOE, QWEN3

SIZE = 4
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "untied": LLAMA | {"vocab_size": 97},
    "tied": LLAMA | {"vocab_size": 97, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen3": QWEN3 | {"vocab_size": 98},
    "moe": MOE | {"vocab_size": 100, "mlp_only_layers": [1]},
}
"""Two KV heads each: over four ranks every head has two replicas."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.01}


def write_model(model_dir, config, seed):
    """A checkpoint whose every tensor counts."""
    model = CausalLM(parse_model_config(config), Spec(torch.float32, torch.device("cpu"), DistributedInfo(0, 1)))
    tensors = {}
    for index, (name, tensor) in enumerate(model.state_dict().items()):
        scale = 1 if len(tensor.shape) == 1 or "embed" in name else tensor.shape[-1] ** -0.5
        tensors[name] = values(tuple(tensor.shape), torch.float32, seed * 1000 + index) * scale
    model_dir.mkdir(parents=True)
    save_file(tensors, model_dir / "model.safetensors")
    (model_dir / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    for seed, (name, config) in enumerate(MODELS.items()):
        write_model(path / "models" / name, config, seed)
    return path


@pytest.fixture(scope="module")
def ranks(directory):
    """What each of four processes computed, by name."""
    command = [sys.executable, "-m", "tests.distributed.rank", str(SIZE), str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(directory / f"{rank}.pt") for rank in range(SIZE)]


@pytest.fixture(scope="module")
def alone(directory):
    """The same from one rank, in this process."""
    return compute(DistributedInfo(0, 1), None, directory)


def test_every_rank_gets_the_same_bits(ranks):
    assert len(ranks[0]) == 2 * len(SHAPES) * len(DTYPES) + 2 + 15 + 1 + len(MODELS)
    for name, tensor in ranks[0].items():
        assert all(torch.equal(tensor, other[name]) for other in ranks[1:]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_is_the_sum_of_all_ranks(ranks, shape, dtype):
    expected = sum(values(shape, dtype, rank).double() for rank in range(SIZE))
    found = ranks[0][f"sum {shape} {dtype}"]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_come_in_rank_order(ranks, shape, dtype):
    assert torch.equal(ranks[0][f"blocks {shape} {dtype}"], torch.stack([values(shape, dtype, rank) for rank in range(SIZE)]))


def test_tensors_that_are_not_contiguous(ranks):
    parts = [values((6, 4), torch.float32, rank).t() for rank in range(SIZE)]
    assert torch.equal(ranks[0]["blocks transposed"], torch.stack(parts))
    torch.testing.assert_close(ranks[0]["sum transposed"], torch.stack(parts).sum(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 70])
def test_a_cut_vocabulary_of_1003_gives_the_whole_ones_numbers(ranks, count):
    weight = values((VOCAB, HIDDEN), torch.float32, 100)
    assert torch.equal(ranks[0][f"rows {count}"], weight[torch.arange(count) * 14 % VOCAB])
    logits = values((count, HIDDEN), torch.float32, 200) @ weight.t()
    for name in ("logits", "tied logits"):
        assert ranks[0][f"{name} {count}"].shape == (count, VOCAB)
        torch.testing.assert_close(ranks[0][f"{name} {count}"], logits, rtol=0, atol=1e-5)


def test_a_bias_is_added_once(ranks):
    weight, bias, x = (values(shape, torch.float32, 300 + i) for i, shape in enumerate([(10, HIDDEN), (10,), (3, HIDDEN)]))
    torch.testing.assert_close(ranks[0]["row linear"], x @ weight.t() + bias, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_cut_over_four_ranks_gives_the_whole_ones_logits(ranks, alone, name):
    whole = alone[f"model {name}"]
    assert float(whole.std()) > 0.3
    torch.testing.assert_close(ranks[0][f"model {name}"], whole, rtol=0, atol=1e-4)


def test_one_rank_exchanges_nothing():
    comm = make_communicator(DistributedInfo(0, 1), Groups(None, None), CPU)
    tensor = torch.randn(3, 4)
    assert isinstance(comm, SingleRank)
    assert isinstance(comm, Communicator)
    assert torch.equal(comm.all_reduce(tensor.clone()), tensor)
    assert torch.equal(comm.all_gather(tensor), tensor.unsqueeze(0))


def test_several_ranks_need_a_group():
    with pytest.raises(ConfigError, match="4 ranks need a process group for their tensors, none was given"):
        make_communicator(DistributedInfo(1, 4), Groups(None, None), CPU)
