"""The API in front of a real (tiny) model: texts, ids and log probabilities are the offline class's, and the cache does what it says."""

from __future__ import annotations

import os

import httpx
import pytest

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from tests.server.server_process import started, wait_until

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")

PROMPTS = ["The sea is", "One, two,"]
CONTEXT = 256
SEEDED = SamplingParams(max_tokens=12, temperature=0.8, seed=11, n=2)
SCORED = SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=2)


@pytest.fixture(scope="module")
def offline(tiny_models):
    """What the class answers, before the server needs the cores."""
    with LLM(str(tiny_models("llama")), num_pages=64, max_seq_len=CONTEXT) as llm:
        return {
            "greedy": llm.generate(PROMPTS, SamplingParams(max_tokens=12)),
            "seeded": llm.generate(PROMPTS[0], SEEDED)[0].choices,
            "scored": llm.generate(PROMPTS[0], SCORED)[0],
            "ids": llm.tokenizer.encode(PROMPTS[0]),
        }


@pytest.fixture(scope="module")
def api(tiny_models, offline):
    words = ["minisgl", "--model", str(tiny_models("llama")), "--port", "0", "--num-pages", "64", "--max-seq-len", str(CONTEXT)]
    with started(words) as server:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            yield client


def ask(api, path, **body):
    response = api.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_completions_are_the_offline_ones(api, offline):
    body = ask(api, "/v1/completions", prompt=PROMPTS, max_tokens=12, temperature=0)
    assert [choice["text"] for choice in body["choices"]] == [result.text for result in offline["greedy"]]
    assert [choice["finish_reason"] for choice in body["choices"]] == [result.finish_reason for result in offline["greedy"]]
    assert body["usage"]["prompt_tokens"] == sum(result.num_prompt_tokens for result in offline["greedy"])


def test_seeded_choices_are_the_offline_ones(api, offline):
    for _ in range(2):
        body = ask(api, "/v1/completions", prompt=PROMPTS[0], max_tokens=12, temperature=0.8, seed=11, n=2)
        assert [choice["text"] for choice in body["choices"]] == [choice.text for choice in offline["seeded"]]


def test_generate_gives_the_ids(api, offline):
    wanted = offline["greedy"][0]
    params = {"max_tokens": 12, "temperature": 0}
    for prompt in ({"prompt": PROMPTS[0]}, {"input_ids": offline["ids"]}):
        body = ask(api, "/generate", **prompt, sampling_params=params)
        assert (body["token_ids"], body["text"], body["finish_reason"]) == (wanted.token_ids, wanted.text, wanted.finish_reason)


def test_log_probabilities_of_prompt_and_output_are_the_offline_ones(api, offline):
    wanted = offline["scored"]
    body = ask(api, "/v1/completions", prompt=PROMPTS[0], max_tokens=6, temperature=0, logprobs=2, echo=True)
    choice = body["choices"][0]
    assert choice["text"] == PROMPTS[0] + wanted.text
    shown = [entry.logprob for entry in [*wanted.prompt_logprobs, *wanted.logprobs]]
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None
    assert found[1:] == pytest.approx(shown[: len(found) - 1], abs=1e-3)
    assert len(found) in (len(shown) + 1, len(shown))  # an end id is not shown
    assert all(
        max(top.values()) == pytest.approx(entry.top_logprobs[0], abs=1e-3)
        for top, entry in zip(choice["logprobs"]["top_logprobs"][1:], [*wanted.prompt_logprobs, *wanted.logprobs], strict=False)
    )
    assert "".join(choice["logprobs"]["tokens"]).endswith(choice["text"])


def test_tokenize_and_detokenize_go_there_and_back(api, offline):
    assert ask(api, "/tokenize", prompt=PROMPTS[0])["tokens"] == offline["ids"]
    assert ask(api, "/detokenize", tokens=offline["ids"], skip_special_tokens=True)["text"] == PROMPTS[0]


def test_a_repeated_prompt_is_cached_within_its_salt_until_the_cache_is_flushed(api):
    def cached(**more):
        body = ask(api, "/v1/completions", prompt="word " * 40, max_tokens=1, **more)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, second = cached(), cached()
    assert first == 0 < second
    assert cached(cache_salt="other") == 0
    assert ask(api, "/flush_cache") == {"status": "ok"}
    assert cached() == 0


def test_a_running_request_keeps_the_cache_until_it_is_aborted_by_its_id(api):
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True, "max_tokens": 200}
    with api.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        answer_id = next(lines).split('"id":"')[1].split('"')[0]
        next(line for line in lines if '"content":"' in line and '"content":""' not in line)
        busy = api.post("/flush_cache")
        assert ask(api, "/abort", id=answer_id) == {"aborted": 1}
        rest = list(lines)
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "busy")
    assert '"finish_reason":"abort"' in rest[-4]
    assert rest[-2] == "data: [DONE]"
    assert wait_until(lambda: api.post("/flush_cache").status_code == 200)


def test_more_tokens_than_the_context_leaves_are_cut_to_it(api):
    body = ask(api, "/v1/completions", prompt=[5] * 240, max_tokens=999999, ignore_eos=True)
    assert (body["usage"]["total_tokens"], body["choices"][0]["finish_reason"]) == (CONTEXT, "length")
