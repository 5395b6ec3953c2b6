"""On a GPU, a profile counts kernels: those of a prefill step, and those that a replayed CUDA graph holds."""

from __future__ import annotations

import json

import pytest

from minisgl.bench.profile import profile
from minisgl.core import SamplingParams
from minisgl.llm import LLM

pytestmark = pytest.mark.gpu


def test_kernels_are_counted_inside_graphs_and_outside(tiny_models, tmp_path):
    prompts = [[request + 7 * place for place in range(12)] for request in range(3)]
    params = [SamplingParams(ignore_eos=True, max_tokens=12)] * 3
    with LLM(tiny_models("llama"), num_pages=16, max_running_req=4, device="cuda") as llm:
        engine = llm.scheduler.engine
        llm.generate(prompts, params)
        report = profile(llm, (prompts, params), 5, tmp_path / "trace.json", lambda line: None)
        assert llm.scheduler.engine is engine
    assert report["device"] == "cuda"
    assert [(part["kind"], part["num_steps"], part["num_rows"]) for part in report["steps"]] == [("decode", 5, 3), ("prefill", 1, 3)]
    for part in report["steps"]:
        assert min(part["us"][label] for label in ("attention", "matrix products", "rotation and K/V", "sampling")) > 0
        assert 0 < part["busy_us"] <= part["sum_us"] + 1
    for file, name in (("trace.json", "_decode_kernel"), ("prefill-trace.json", "_prefill_kernel")):
        events = json.loads((tmp_path / file).read_text(encoding="utf-8"))["traceEvents"]
        assert any(event.get("name") == name for event in events)
