"""Two GPUs that share a model: the ids of transformers, with NCCL inside CUDA graphs, and an end that comes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.llm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs"), pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
NUM_NEW = 32
END_S = 15


@pytest.mark.parametrize("nccl_only", ["", "1"], ids=["symmetric memory", "NCCL only"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_two_ranks_give_the_ids_of_transformers(tiny_models, monkeypatch, name, nccl_only):
    monkeypatch.setenv("MINISGL_DISABLE_SYMMETRIC_MEMORY", nccl_only)
    path = tiny_models(name)
    cases = json.loads((path / "expected.json").read_text(encoding="utf-8"))["cases"]
    greedy = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    llm = LLM(path, dtype="float32", device="cuda", num_pages=256, tp_size=2)
    results = llm.generate([case["ids"] for case in cases], greedy, progress=False)
    assert [result.token_ids for result in results] == [case["out"][:NUM_NEW] for case in cases]
    alone = llm.generate([cases[0]["ids"]], greedy, progress=False)[0]
    assert alone.token_ids == results[0].token_ids
    start = time.monotonic()
    llm.close()
    assert time.monotonic() - start < END_S


def test_sums_through_symmetric_memory_are_exact_in_every_type_and_size(tmp_path):
    """The benchmark checks them, and fails where the GPUs share no memory or NCCL serves what it should not."""
    done = subprocess.run(
        [sys.executable, "benchmark/gpu/all_reduce.py", "--out", str(tmp_path / "sums.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0
    assert [row["kib"] for row in json.loads((tmp_path / "sums.json").read_text())["sums"]] == [10, 64, 256, 640, 1024, 2048, 4096]
