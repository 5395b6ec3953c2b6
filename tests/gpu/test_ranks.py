"""Two GPUs that share a model: the ids of transformers, with NCCL inside CUDA graphs, and an end that comes."""

import json
import time

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.llm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs"), pytest.mark.timeout(180)]

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
