"""A request whose numbers overflow must end by itself and spoil nothing that uses its pages afterwards."""

import json

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.llm import LLM

POISON = 7
NUM_NEW = 12


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "logprobs": 2}], ids=["greedy", "sampled"])
def test_numbers_that_are_not_finite_end_their_request_and_spoil_no_later_one(tiny_models, cache_type, params):
    path = tiny_models("llama")
    cases = [case for case in json.loads((path / "expected.json").read_text(encoding="utf-8"))["cases"] if POISON not in case["ids"]]
    prompts, expected = [case["ids"] for case in cases], [case["out"][:NUM_NEW] for case in cases]
    greedy = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(path, cache_type=cache_type, num_pages=32, page_size=16) as llm:
        llm.scheduler.engine.model.state_dict()["model.embed_tokens.weight"][POISON] = float("inf")
        for _ in range(2):
            bad = llm.generate([[POISON] * 200, prompts[0]], [SamplingParams(max_tokens=4, **params), greedy], progress=False)
            assert bad[0].finish_reason == "error"
            assert "not finite" in bad[0].error
            assert bad[0].token_ids == []
            assert bad[1].token_ids == expected[0]
            later = llm.generate(prompts, greedy, progress=False)
            assert [result.token_ids for result in later] == expected
        llm.scheduler.check_integrity()
        counts = llm.scheduler.page_counts
        assert counts.free + counts.evictable == counts.total


def test_what_an_earlier_owner_left_is_not_seen(tiny_models):
    path = tiny_models("llama")
    case = json.loads((path / "expected.json").read_text(encoding="utf-8"))["cases"][1]
    with LLM(path, num_pages=32, page_size=16) as llm:
        for pool in pools(llm):
            pool.fill_(float("nan"))
        result = llm.generate([case["ids"]], SamplingParams(max_tokens=NUM_NEW, ignore_eos=True))[0]
    assert result.token_ids == case["out"][:NUM_NEW]


def pools(llm):
    """The tensors of the KV pool."""
    found = [value for value in vars(llm.scheduler.engine).values() if hasattr(value, "pool")]
    return [tensor for backend in found for tensor in (backend.pool.k, backend.pool.v) if isinstance(tensor, torch.Tensor)]
