"""Same request, same ids, in fp32: whatever runs beside it, however it is cut, retracted, cached or planned, and after a restart."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from minisgl.core import SamplingParams

NUM_NEW = 20


def ids(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4000) for _ in range(num_tokens)]


def params(**settings) -> SamplingParams:
    return SamplingParams(ignore_eos=True, max_tokens=NUM_NEW, **settings)


REQUESTS = [
    (ids(5, 1), params(temperature=0.8, seed=42)),
    (ids(37, 2), params(temperature=1.2, seed=42, top_k=50, frequency_penalty=0.5, repetition_penalty=1.3)),
    (ids(48, 3), params(temperature=1.0, seed=2**64 - 1, top_p=0.9, min_p=0.01, presence_penalty=1.0, logit_bias={5: 4.0})),
    (ids(33, 4), params()),
    (ids(21, 5), params(frequency_penalty=-2.0, presence_penalty=-2.0, min_tokens=3)),
]
"""Seeded, penalised and greedy ones; the last likes to repeat itself, so that a lost count shows."""


def run(llm, *, load: int = 0) -> list[list[int]]:
    """All requests together, with `load` unseeded requests before and after them."""
    noise = [(ids(3 + 7 * number, 100 + number), params(temperature=2.0, top_p=0.99, presence_penalty=-0.5)) for number in range(load)]
    prompts, own = zip(*noise[::2], *REQUESTS, *noise[1::2], strict=True)
    results = llm.generate(prompts, own)
    assert all(result.error is None and len(result.token_ids) == NUM_NEW for result in results)
    first = len(noise[::2])
    llm.scheduler.check_integrity()
    return [result.token_ids for result in results[first : first + len(REQUESTS)]]


@pytest.fixture(scope="module")
def solo(llm):
    """Each request alone."""
    return [llm.generate(prompt, own)[0].token_ids for prompt, own in REQUESTS]


def test_in_company_of_unseeded_load(llm, solo):
    assert run(llm, load=6) == solo


def test_twice_at_once(llm, solo):
    prompts, own = zip(*REQUESTS, *REQUESTS, strict=True)
    assert [result.token_ids for result in llm.generate(prompts, own)] == solo * 2


def test_with_the_prefix_from_the_cache(llm, solo):
    results = llm.generate(*zip(*REQUESTS, strict=True))
    assert [result.token_ids for result in results] == solo
    assert [result.num_cached_tokens for result in results] == [0, 32, 32, 32, 16]


SETTINGS = {
    "in another object": {},
    "planned ahead": {"overlap": True},
    "not planned ahead": {"overlap": False},
    "in chunks": {"max_extend_tokens": 7, "max_extend_tokens_beside_decode": 3},
    "in pages of one token, planned ahead": {"page_size": 1, "num_pages": 1024, "overlap": True},
    "without a prefix cache": {"cache_type": "naive"},
    "two at a time": {"max_running_req": 2},
}


LATER = ("in another object", "planned ahead", "not planned ahead")
"""Left to the slow tests: the others vary the same things, and more."""


@pytest.mark.parametrize(
    "settings",
    [pytest.param(settings, id=name, marks=pytest.mark.slow if name in LATER else ()) for name, settings in SETTINGS.items()],
)
def test_with_other_settings(settings, make_llm, solo):
    assert run(make_llm(**settings), load=2) == solo


@pytest.mark.slow
def test_after_a_restart(tiny_models, solo):
    """In another process, with another hash seed."""
    program = (
        "import json, sys\n"
        "from minisgl.llm import LLM\n"
        "from tests.llm.conftest import SMALL\n"
        "from tests.llm.test_same_ids import run\n"
        "print(json.dumps(run(LLM(sys.argv[1], **SMALL), load=2)))\n"
    )
    model = str(tiny_models("llama"))
    ended = subprocess.run([sys.executable, "-c", program, model], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == solo


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_after_retractions(overlap, make_llm, solo):
    """A pool of 80 tokens, and room is kept for one token of output only."""
    llm = make_llm(num_pages=20, page_size=4, reserve_tokens=1, overlap=overlap)
    assert run(llm, load=2) == solo
    assert llm.scheduler.num_retractions >= 3


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_was_said_counts_after_a_retraction(overlap, llm, make_llm):
    """The younger request yields in the middle of an output that lives from what it has said."""
    older = (ids(20, 6), SamplingParams(ignore_eos=True, max_tokens=40))
    younger = (ids(8, 7), SamplingParams(ignore_eos=True, max_tokens=40, frequency_penalty=-2.0, presence_penalty=-2.0))
    alone = [llm.generate(*request)[0].token_ids for request in (older, younger)]
    assert len(set(alone[1])) < 25, "it is to repeat itself"
    small = make_llm(num_pages=20, page_size=4, reserve_tokens=1, overlap=overlap)
    results = small.generate(*zip(older, younger, strict=True))
    assert small.scheduler.num_retractions >= 1
    assert [result.token_ids for result in results] == alone


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "qwen3", "qwen3-moe", "mistral"])
def test_with_other_models(model, make_llm):
    llm = make_llm(model)
    alone = [llm.generate(prompt, own)[0].token_ids for prompt, own in REQUESTS]
    assert run(llm, load=6) == alone
    assert run(make_llm(model, num_pages=20, page_size=4, reserve_tokens=1, overlap=True), load=2) == alone


def test_another_seed_gives_other_ids(llm):
    prompt, _ = REQUESTS[0]
    results = llm.generate([prompt] * 3, [params(temperature=1.0, seed=seed) for seed in (1, 2, 1 + 2**32)])
    assert len({tuple(result.token_ids) for result in results}) == 3


def test_choices_are_distinct_and_are_the_requests_of_their_seeds(llm):
    prompt, step = REQUESTS[1][0], 0x9E3779B97F4A7C15
    whole = llm.generate(prompt, params(temperature=1.0, seed=7, n=3))[0]
    single = llm.generate([prompt] * 3, [params(temperature=1.0, seed=(7 + i * step) % 2**64) for i in range(3)])
    assert [choice.token_ids for choice in whole.choices] == [result.token_ids for result in single]
    assert len({tuple(choice.token_ids) for choice in whole.choices}) == 3
    assert whole.token_ids == whole.choices[0].token_ids


def test_unseeded_choices_and_requests_differ_from_each_other(llm):
    prompt, _ = REQUESTS[0]
    results = llm.generate([prompt] * 2, params(temperature=1.5, n=2))
    assert len({tuple(choice.token_ids) for result in results for choice in result.choices}) == 4
