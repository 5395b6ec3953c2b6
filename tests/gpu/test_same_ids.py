"""On a GPU the engine gives the ids of transformers, in fp32: through graphs, overlap, chunks, shared prefixes and retraction."""

import json

import pytest

from minisgl.core import SamplingParams
from minisgl.llm import LLM

pytestmark = pytest.mark.gpu

NAMES = ("llama", "qwen2", "qwen3", "qwen3-moe", "mistral")
NUM_NEW = 32
GREEDY = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
SETTINGS = {
    "graphs and overlap": {},
    "no graphs": {"cuda_graph_max_bs": 0},
    "plain order": {"overlap": False},
    "torch attention": {"attention_backend": "torch"},
    "7 tokens a step": {"max_extend_tokens": 7},
    "64 tokens a step, pages of 16": {"max_extend_tokens": 64, "page_size": 16},
    "pages of 1": {"page_size": 1},
    "no shared prefixes": {"cache_type": "naive"},
}
VARIED = {
    "seeded": SamplingParams(temperature=1.0, seed=11, max_tokens=NUM_NEW, ignore_eos=True),
    "top-p and top-k": SamplingParams(temperature=0.9, top_p=0.8, top_k=20, seed=3, max_tokens=NUM_NEW, ignore_eos=True),
    "min-p": SamplingParams(temperature=1.3, min_p=0.05, seed=4, max_tokens=NUM_NEW, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, seed=5, max_tokens=NUM_NEW, ignore_eos=True
    ),
    "bias and end ids": SamplingParams(logit_bias={5: 100.0, 7: -100.0}, min_tokens=4, max_tokens=NUM_NEW),
    "greedy": GREEDY,
}


def cases(path):
    found = json.loads((path / "expected.json").read_text(encoding="utf-8"))["cases"]
    return [case["ids"] for case in found], [case["out"][:NUM_NEW] for case in found]


def cuda(path, **settings):
    return LLM(path, dtype="float32", device="cuda", num_pages=4096 // settings.get("page_size", 64) + 16, **settings)


def ids_of(results):
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_those_of_transformers(tiny_models, name, settings):
    path = tiny_models(name)
    prompts, expected = cases(path)
    with cuda(path, **SETTINGS[settings]) as llm:
        cold = ids_of(llm.generate(prompts, GREEDY, progress=False))
        warm = ids_of(llm.generate(prompts, GREEDY, progress=False))
        llm.scheduler.check_integrity()
    assert cold == expected
    assert warm == expected


@pytest.mark.parametrize("num_rows", [1, 3, 5, 7, 9])
def test_graphs_change_no_id_at_any_number_of_rows(tiny_models, num_rows):
    path = tiny_models("qwen3")
    prompts = (cases(path)[0] * 9)[:num_rows]
    params = [SamplingParams(temperature=float(row % 2), seed=row, max_tokens=NUM_NEW, ignore_eos=True) for row in range(num_rows)]
    with cuda(path) as llm:
        with_graphs = ids_of(llm.generate(prompts, params, progress=False))
    with cuda(path, cuda_graph_max_bs=0) as llm:
        without = ids_of(llm.generate(prompts, params, progress=False))
    assert with_graphs == without


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_kind_of_sampling_gives_the_ids_of_the_cpu(tiny_models, name):
    path = tiny_models(name)
    prompt = cases(path)[0][1]
    params = list(VARIED.values())
    with LLM(path, device="cpu", num_pages=256) as llm:
        expected = ids_of(llm.generate([prompt] * len(params), params, progress=False))
    with cuda(path) as llm:
        found = ids_of(llm.generate([prompt] * len(params), params, progress=False))
        alone = [ids_of(llm.generate([prompt], [own], progress=False))[0] for own in params]
    assert dict(zip(VARIED, found, strict=True)) == dict(zip(VARIED, expected, strict=True))
    assert alone == expected


def test_logprobs_are_those_of_the_cpu(tiny_models):
    path = tiny_models("llama")
    prompt = cases(path)[0][1]
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    results = []
    for device in ("cpu", "cuda"):
        with LLM(path, dtype="float32", device=device, num_pages=256) as llm:
            results.append(llm.generate([prompt], params, progress=False)[0])
    on_cpu, on_gpu = results
    assert on_gpu.token_ids == on_cpu.token_ids
    for mine, theirs in zip(on_gpu.logprobs, on_cpu.logprobs, strict=True):
        assert mine.top_ids == theirs.top_ids
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("page_size", [1, 16])
def test_retracted_requests_give_their_solo_ids(tiny_models, page_size):
    path = tiny_models("llama")
    prompts = [[5 + row] * (20 + 3 * row) for row in range(8)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    settings = {"device": "cuda", "dtype": "float32", "page_size": page_size, "reserve_tokens": 1}
    with LLM(path, num_pages=2048 // page_size, **settings) as llm:
        solo = [ids_of(llm.generate([prompt], params, progress=False))[0] for prompt in prompts]
    with LLM(path, num_pages=130 // page_size, **settings) as llm:
        together = ids_of(llm.generate(prompts, params, progress=False))
        assert llm.scheduler.num_retractions > 0
        llm.scheduler.check_integrity()
    assert together == solo
