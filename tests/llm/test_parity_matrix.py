"""The ids of transformers, whatever the ledger does: both prefix caches, cold and warm, page sizes, overlapped and plain steps."""

import itertools
import json

import pytest

from minisgl.core import SamplingParams
from minisgl.llm import LLM

NUM_NEW = 32
DEFAULT = {("llama", "radix", 1, False), ("llama", "radix", 16, True), ("llama", "naive", 64, True)}
"""These stand for all in the default suite; the whole matrix is slow."""
MATRIX = [
    pytest.param(*entry, marks=[] if entry in DEFAULT else pytest.mark.slow, id="-".join(map(str, entry)))
    for entry in itertools.product(("llama", "qwen2", "qwen3", "qwen3-moe", "mistral"), ("radix", "naive"), (1, 16, 64), (False, True))
]


@pytest.mark.parametrize(("model", "cache_type", "page_size", "overlap"), MATRIX)
def test_greedy_ids_are_those_of_transformers(tiny_models, model, cache_type, page_size, overlap):
    path = tiny_models(model)
    cases = json.loads((path / "expected.json").read_text(encoding="utf-8"))["cases"]
    prompts, expected = [case["ids"] for case in cases], [case["out"][:NUM_NEW] for case in cases]
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    num_pages = -(-2048 // page_size) + 16
    with LLM(path, cache_type=cache_type, page_size=page_size, num_pages=num_pages, overlap=overlap, max_extend_tokens=64) as llm:
        cold = llm.generate(prompts, params, progress=False)
        warm = llm.generate(prompts, params, progress=False)
        llm.scheduler.check_integrity()
    assert [result.token_ids for result in cold] == expected
    assert [result.token_ids for result in warm] == expected
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    assert (warm[longest].num_cached_tokens > 0) == (cache_type == "radix")
