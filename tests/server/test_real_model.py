"""The API in front of a real (tiny) model: texts, ids and log probabilities are the offline class's, and the cache does what it says."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

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


END_IDS = {88, 77, 4095, 4094}
"""of the config, of the generation_config (two), and of the tokenizer, with which turns end"""
BOS_ID = 4090


@pytest.fixture(scope="module")
def model(tiny_models, tmp_path_factory):
    """A model that has several end ids."""
    directory = shutil.copytree(tiny_models("llama"), tmp_path_factory.mktemp("model") / "llama")
    for name, value in (("config.json", 88), ("generation_config.json", [77, 4095])):
        settings = json.loads((directory / name).read_text(encoding="utf-8"))
        (directory / name).write_text(json.dumps(settings | {"eos_token_id": value}), encoding="utf-8")
    return str(directory)


@pytest.fixture(scope="module")
def offline(model):
    """What the class answers, before the server needs the cores."""
    with LLM(model, num_pages=64, max_seq_len=CONTEXT) as llm:
        return {
            "greedy": llm.generate(PROMPTS, SamplingParams(max_tokens=12)),
            "seeded": llm.generate(PROMPTS[0], SEEDED)[0].choices,
            "scored": llm.generate(PROMPTS[0], SCORED)[0],
            "ids": llm.tokenizer.encode(PROMPTS[0]),
        }


@pytest.fixture(scope="module")
def api(model, offline):
    words = ["minisgl", "--model", model, "--port", "0", "--num-pages", "64", "--max-seq-len", str(CONTEXT)]
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


def seeded_chat(api):
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    body = ask(api, "/v1/chat/completions", messages=messages, max_tokens=20, temperature=0.8, seed=42, ignore_eos=True)
    return body["choices"][0]["message"]["content"]


def greedy_chat(api, number):
    messages = [{"role": "user", "content": f"Story {number}"}]
    body = ask(api, "/v1/chat/completions", messages=messages, max_tokens=20, temperature=0, ignore_eos=True)
    return body["choices"][0]["message"]["content"]


def test_a_seeded_answer_is_the_same_alone_beside_load_and_twice_at_once_and_changes_no_neighbour(api):
    alone, neighbours = seeded_chat(api), [greedy_chat(api, number) for number in range(3)]
    assert len(alone) > 5
    unseeded = {"prompt": "Noise " * 5, "max_tokens": 60, "temperature": 1.0, "ignore_eos": True, "n": 4}
    with ThreadPoolExecutor(8) as threads:
        load = [threads.submit(ask, api, "/v1/completions", **unseeded) for _ in range(2)]
        twice = [threads.submit(seeded_chat, api) for _ in range(2)]
        beside = [threads.submit(greedy_chat, api, number) for number in range(3)]
        assert [future.result() for future in twice] == [alone, alone]
        assert [future.result() for future in beside] == neighbours
        noise = [choice["text"] for future in load for choice in future.result()["choices"]]
    assert len(set(noise)) > 1
    assert seeded_chat(api) == alone


@pytest.mark.parametrize("end_id", sorted(END_IDS))
def test_each_end_id_of_the_models_files_stops_and_is_not_shown(api, end_id):
    forced = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logit_bias": {str(end_id): 100}, "temperature": 0}
    choice = ask(api, "/v1/chat/completions", **forced)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    with api.stream("POST", "/v1/chat/completions", json={**forced, "stream": True}) as response:
        chunks = [json.loads(line[6:])["choices"][0] for line in response.iter_lines() if line and not line.endswith("[DONE]")]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == ""
    assert chunks[-1]["finish_reason"] == "stop"
    ignored = ask(api, "/v1/chat/completions", **forced, ignore_eos=True)
    assert (ignored["choices"][0]["finish_reason"], ignored["usage"]["completion_tokens"]) == ("length", 3)


def test_another_special_token_is_no_end(api):
    choice = ask(api, "/v1/completions", prompt="x", max_tokens=3, logit_bias={"4092": 100}, temperature=0)["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_chat_has_one_bos_and_as_many_tokens_as_transformers_says(api, model):
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
    wanted = AutoTokenizer.from_pretrained(model).apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert wanted.count(BOS_ID) == 1
    assert ask(api, "/tokenize", messages=messages)["tokens"] == wanted
    answer = ask(api, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(wanted)
    ids = ask(api, "/tokenize", prompt="Hi there")["tokens"]
    assert (ids.count(BOS_ID), ids[0]) == (1, BOS_ID)
    assert ask(api, "/v1/completions", prompt="Hi there", max_tokens=1)["usage"]["prompt_tokens"] == len(ids)


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
