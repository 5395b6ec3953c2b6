"""What a rank needs while it loads: its own shard and one tensor, measured on a checkpoint of some 380 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from minisgl.distributed import DistributedInfo
from minisgl.layers.base import Spec
from minisgl.models.config import parse_model_config
from minisgl.models.decoder import CausalLM
from tests.models.small import LLAMA

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")]

MIB = 2**20
ALLOWANCE = 24 * MIB
"""For what is not a tensor: the checkpoint's index, code that is loaded on the first use, blocks that malloc keeps."""
SIZES = {"vocab_size": 16_000, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}
PROGRAM = """
import json, sys, threading
from pathlib import Path
import torch
from minisgl.distributed import DistributedInfo
from minisgl.layers.base import Spec
from minisgl.models.config import load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import load_weights

def anonymous():  # mapped pages of the file are the system's, and given back as soon as somebody wants them
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024

def watch():
    while not done.is_set():
        peaks[-1] = max(peaks[-1], anonymous())
        done.wait(0.001)

torch.set_num_threads(1)
torch.randn(64, 64) @ torch.randn(64, 64)
folder, tp = Path(sys.argv[1]), DistributedInfo(0, int(sys.argv[2]))
config, done = load_model_config(folder), threading.Event()
model = CausalLM(config, Spec(torch.float32, torch.device("cpu"), tp))
before = anonymous()
peaks = [before]
thread = threading.Thread(target=watch)
thread.start()
load_weights(model, folder, config, tp)
peaks.append(0)
model.pack()
done.set()
thread.join()
print(json.dumps([peak - before for peak in peaks]))
"""
"""Prints the most bytes that loading, then packing, took beside what was there before."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, bytes of the whole, bytes of the largest tensor)"""
    folder = tmp_path_factory.mktemp("checkpoint")
    raw = LLAMA | SIZES
    (folder / "config.json").write_text(json.dumps(raw))
    parameters = CausalLM(parse_model_config(raw), Spec(torch.float32, torch.device("cpu"), DistributedInfo(0, 1))).state_dict()
    path = folder / "model.safetensors"
    save_file({name: torch.randn(tensor.shape) for name, tensor in parameters.items()}, path)
    sizes = [tensor.numel() * tensor.element_size() for tensor in parameters.values()]
    yield folder, sum(sizes), max(sizes)
    path.unlink()


def peaks(folder, tp_size: int) -> list[int]:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(tp_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout)


def test_a_rank_of_two_loads_with_its_shard_and_one_tensor(checkpoint):
    folder, whole, largest = checkpoint
    assert whole > 350 * MIB
    shard = whole / 2  # all but the norms, which are some kilobytes
    loading, packing = peaks(folder, 2)
    assert shard - ALLOWANCE < loading < shard + largest + ALLOWANCE < whole
    assert packing < shard + largest + ALLOWANCE


def test_one_rank_needs_the_whole_so_the_measure_tells_them_apart(checkpoint):
    folder, whole, largest = checkpoint
    loading, packing = peaks(folder, 1)
    assert whole - ALLOWANCE < max(loading, packing) < whole + largest + ALLOWANCE
