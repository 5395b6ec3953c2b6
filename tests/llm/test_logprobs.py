"""Log probabilities of whole requests: those of transformers on the raw logits, each position once, whatever else is going on."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl.core import SamplingParams
from tests.engine.parity import NOISE_BOUND, Expected


def ids(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4000) for _ in range(num_tokens)]


class Reference:
    """transformers' log probabilities, and how far another fp32 computation may be from them."""

    def __init__(self, tiny_models):
        self._tiny_models, self._models = tiny_models, {}

    def __call__(self, name: str, token_ids: list[int]) -> torch.Tensor:
        """fp32 [len(ids), V] after each prefix"""
        if name not in self._models:
            self._models[name] = AutoModelForCausalLM.from_pretrained(self._tiny_models(name), dtype=torch.float32)
        with torch.inference_mode():
            return self._models[name](torch.tensor([token_ids])).logits[0].float().log_softmax(-1)

    def bound(self, name: str) -> float:
        return NOISE_BOUND * Expected.of(self._tiny_models(name)).noise


@pytest.fixture(scope="module")
def reference(tiny_models):
    return Reference(tiny_models)


def check(entries, token_ids, logprobs, num_top, close) -> None:
    """`entries` are about `token_ids`; row i of `logprobs` [n, V] is the distribution at entry i."""
    assert [entry.token_id for entry in entries] == token_ids
    for entry, row in zip(entries, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=close)
        top = row.topk(num_top)
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=close)
        for token_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
            assert float(row[token_id]) == pytest.approx(value, abs=close)


HEAVY = {"temperature": 1.3, "seed": 3, "top_k": 40, "repetition_penalty": 1.4, "presence_penalty": 1.0, "logit_bias": {7: 9.0}}


def check_request(llm, reference, model: str, prompt: list[int], **settings) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=3, **settings)
    result = llm.generate(prompt, params)[0]
    logprobs = reference(model, prompt + result.token_ids)
    check(result.logprobs, result.token_ids, logprobs[len(prompt) - 1 : -1], 4, reference.bound(model))
    check(result.prompt_logprobs, prompt[1:], logprobs[: len(prompt) - 1], 3, reference.bound(model))
    assert result.num_cached_tokens == 0


@pytest.mark.parametrize("settings", [{}, HEAVY], ids=["greedy", "bias, penalties, temperature and filters"])
def test_values_are_those_of_transformers(settings, llm, reference):
    check_request(llm, reference, "llama", ids(40, 1), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "qwen3", "qwen3-moe", "mistral"])
def test_values_are_those_of_transformers_for_other_models(model, make_llm, reference):
    check_request(make_llm(model), reference, model, ids(60, 2), **HEAVY)


def test_a_prompt_is_scored_whole_although_it_is_cached(llm, reference):
    prompt = ids(50, 3)
    llm.generate(prompt, SamplingParams(max_tokens=1))
    assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens == 48
    check_request(llm, reference, "llama", prompt)


def test_a_prompt_is_scored_chunk_by_chunk(make_llm, reference):
    llm = make_llm(max_extend_tokens=7)
    check_request(llm, reference, "llama", ids(50, 4))


def test_a_long_prompt_is_scored_in_one_step(make_llm, reference):
    check_request(make_llm(max_extend_tokens=1024), reference, "llama", ids(600, 5))


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17])
def test_prompts_around_a_page_have_one_entry_less_than_tokens(num_tokens, llm):
    result = llm.generate(ids(num_tokens, 6), SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0))[0]
    assert [entry.token_id for entry in result.prompt_logprobs] == ids(num_tokens, 6)[1:]
    assert [len(entry.top_ids) for entry in result.prompt_logprobs + result.logprobs] == [0] * num_tokens


def by_position(result) -> list[tuple]:
    """Everything said about positions, rounded to what fp32 keeps in other company."""
    entries = [*(result.prompt_logprobs or []), *(result.logprobs or [])]
    return [(entry.token_id, round(entry.logprob, 3)) for entry in entries]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_retraction_in_mid_prompt_neither_repeats_nor_loses_an_entry(overlap, make_llm):
    """The first request's output takes the pages that the second one's prompt needs."""
    settings = {"num_pages": 20, "page_size": 4, "reserve_tokens": 1, "max_extend_tokens": 4, "overlap": overlap}
    writer = (ids(8, 7), SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1))
    scored = (ids(60, 8), SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=2))
    llm = make_llm(**settings)
    alone = [llm.generate(*request)[0] for request in (writer, scored)]
    assert llm.scheduler.num_retractions == 0
    llm.scheduler.reset_prefix_cache()
    together = llm.generate([writer[0], scored[0]], [writer[1], scored[1]])
    assert llm.scheduler.num_retractions >= 1
    assert [len(result.prompt_logprobs or []) for result in together] == [0, 59]
    assert [by_position(result) for result in together] == [by_position(result) for result in alone]


def test_neighbours_that_end_or_are_given_up_disturb_nobody(make_llm):
    """Planned ahead, a row whose request has ended is still computed, and its entry must go to nobody."""
    llm = make_llm(overlap=True, max_extend_tokens=16)
    requests = [
        (
            ids(10 + 9 * number, 20 + number),
            SamplingParams(max_tokens=4 + 3 * number, ignore_eos=True, logprobs=number % 3, temperature=0.9),
        )
        for number in range(6)
    ]
    requests = [
        (prompt, params) if number % 2 else (prompt, SamplingParams(max_tokens=9)) for number, (prompt, params) in enumerate(requests)
    ]
    given_up = llm.stream(ids(30, 30), SamplingParams(max_tokens=100, ignore_eos=True, logprobs=5))
    for _ in range(3):
        next(given_up)
    watched = llm.stream(ids(12, 31), SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=1))
    next(watched)
    given_up.close()
    results = llm.generate(*zip(*requests, strict=True))
    last = list(watched)[-1].result
    alone = llm.generate(ids(12, 31), SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=1))[0]
    assert by_position(last) == by_position(alone)
    for (_, params), result in zip(requests, results, strict=True):
        assert (result.logprobs is None) == (params.logprobs is None)
        if result.logprobs is not None:
            assert [entry.token_id for entry in result.logprobs] == result.token_ids
            assert {len(entry.top_ids) for entry in result.logprobs} == {params.logprobs}


def test_every_value_is_finite_or_none(llm):
    result = llm.generate(ids(20, 9), SamplingParams(max_tokens=8, logprobs=20, prompt_logprobs=20, logit_bias={3: 100.0}))[0]
    for entry in result.logprobs + result.prompt_logprobs:
        for value in (entry.logprob, *entry.top_logprobs):
            assert value is None or (math.isfinite(value) and value <= 0)


def test_who_asks_for_none_gets_none(llm):
    result = llm.generate(ids(5, 10), SamplingParams(max_tokens=2))[0]
    assert result.logprobs is None
    assert result.prompt_logprobs is None
