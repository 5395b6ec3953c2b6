"""Chats beyond one plain answer: choices, log probabilities, control tokens as text, template variables, salts, defaults, exact bytes."""

from __future__ import annotations

import json
import re

import pytest

from minisgl.core import SEED_STEP, SamplingParams
from minisgl.errors import ModelFormatError
from minisgl.message import DetokenizeMsg, PromptLogprobsMsg
from minisgl.server.defaults import read_defaults
from tests.server.local_server import WAIT, local_server, scored


def finish(server, answer, text="", reason="length"):
    """Play the scheduler for one pending request; what it heard, and the response's body."""
    request = server.scheduler.hear_request()
    server.scheduler.say(request.uid, text)
    server.scheduler.end(request.uid, reason)
    response = answer.result(WAIT)
    assert response.status_code == 200, response.text
    return request, response.json()


# ---- choices ------------------------------------------------------------------------------------------------------------------


def test_several_choices_have_seeds_endings_and_texts_of_their_own_and_count_the_prompt_once(server):
    answer = server.start_chat(n=2, seed=3)
    first, second = server.scheduler.hear_request(), server.scheduler.hear_request()
    assert [first.sampling_params.seed, second.sampling_params.seed] == [3, 3 + SEED_STEP]
    server.scheduler.say(second.uid, "two")
    server.scheduler.end(second.uid, "stop", token=256)
    server.scheduler.say(first.uid, "one")
    server.scheduler.end(first.uid)
    body = answer.result(WAIT).json()
    found = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]]
    assert found == [(0, "one", "length"), (1, "two", "stop")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 7)


def test_streamed_choices_each_have_one_role_and_one_ending(server):
    with server.stream_chat(n=3) as response:
        requests = [server.scheduler.hear_request() for _ in range(3)]
        for place, request in reversed(list(enumerate(requests))):
            server.scheduler.say(request.uid, f"choice {place}")
            server.scheduler.end(request.uid)
        choices = [event["choices"][0] for event in server.events(response)]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in own[1:-1]) == f"choice {index}"
        assert (own[-1]["delta"], own[-1]["finish_reason"]) == ({}, "length")
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)


def test_leaving_a_stream_of_several_choices_aborts_those_that_have_not_ended(server):
    with server.stream_chat(n=3) as response:
        uids = [server.scheduler.hear_request().uid for _ in range(3)]
        server.scheduler.end(uids[1])
        events = server.events(response)
        while next(events)["choices"][0]["finish_reason"] is None:
            pass
    assert [server.scheduler.hear_abort(), server.scheduler.hear_abort()] == [uids[0], uids[2]]
    assert server.hears_no_abort()


def test_cached_tokens_are_told(server):
    answer = server.start_chat()
    uid = server.scheduler.hear_request().uid
    server.scheduler.send(DetokenizeMsg(uid, ord("a"), num_cached_tokens=4))
    server.scheduler.end(uid)
    assert answer.result(WAIT).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


# ---- log probabilities --------------------------------------------------------------------------------------------------------

FIRST = {
    "token": "a",
    "logprob": -0.97,
    "bytes": [97],
    "top_logprobs": [{"token": "a", "logprob": -0.97, "bytes": [97]}, {"token": "b", "logprob": -1.07, "bytes": [98]}],
}


def test_log_probabilities_plain_and_streamed(server):
    fields = {"logprobs": True, "top_logprobs": 2}
    answer = server.start_chat(**fields)
    request = server.scheduler.hear_request()
    assert request.sampling_params.logprobs == 2
    server.scheduler.say_scored(request.uid, "aé", 2)
    server.scheduler.end(request.uid, "stop", token=256)
    plain = answer.result(WAIT).json()["choices"][0]["logprobs"]
    assert plain["content"][0] == FIRST
    assert [each["bytes"] for each in plain["content"]] == [[97], [0xC3], [0xA9]]
    assert [each["token"] for each in plain["content"]] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert plain["refusal"] is None
    with server.stream_chat(**fields) as response:
        request = server.scheduler.hear_request()
        server.scheduler.say_scored(request.uid, "aé", 2)
        server.scheduler.end(request.uid, "stop", token=256)
        choices = [event["choices"][0] for event in server.events(response)]
    assert [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]] == plain["content"]
    assert choices[0]["logprobs"] is choices[-1]["logprobs"] is None


def test_log_probabilities_without_alternatives_and_one_that_is_not_finite(server):
    answer = server.start_chat(logprobs=True)
    request = server.scheduler.hear_request()
    assert request.sampling_params.logprobs == 0
    score = scored(ord("a"))
    server.scheduler.send(DetokenizeMsg(request.uid, ord("a"), logprobs=type(score)(score.token_id, None)))
    server.scheduler.end(request.uid)
    (only,) = answer.result(WAIT).json()["choices"][0]["logprobs"]["content"]
    assert only == {"token": "a", "logprob": -9999.0, "bytes": [97], "top_logprobs": []}


def test_log_probabilities_of_the_prompt(server):
    answer = server.start_chat(content="pq", prompt_logprobs=0)
    request = server.scheduler.hear_request()
    assert request.sampling_params.prompt_logprobs == 0
    server.scheduler.send(PromptLogprobsMsg(request.uid, [scored(ord("q"))]))
    server.scheduler.end(request.uid)
    choice = answer.result(WAIT).json()["choices"][0]
    assert [each["token"] for each in choice["prompt_logprobs"]] == ["q"]
    assert choice["logprobs"] is None


# ---- the prompt ---------------------------------------------------------------------------------------------------------------


def test_a_control_token_spelled_in_a_message_stays_text_unless_it_is_allowed(server):
    spelled = "a<|end|>b"
    parts = [{"type": "text", "text": "a<|e"}, {"type": "text", "text": "nd|>b"}]
    for content in (spelled, parts):
        request, _ = finish(server, server.start_chat(messages=[{"role": "user", "content": content}]))
        assert bytes(request.input_ids.tolist()) == spelled.encode()
    request, _ = finish(server, server.start_chat(content=spelled, allow_control_tokens=True))
    assert request.input_ids.tolist() == [97, 256, 98]


def test_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request, _ = finish(server, server.start_chat(messages=[{"role": "user", "content": parts}]))
    assert bytes(request.input_ids.tolist()) == b"ab"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}, {"role": "tool", "tool_call_id": "1", "content": "y"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": None}, {"role": "user", "content": "y"}],
    ],
)
def test_roles_reach_the_template_and_what_is_null_is_empty(server, messages):
    request, _ = finish(server, server.start_chat(messages=messages))
    assert bytes(request.input_ids.tolist()).decode() == "".join(message.get("content") or "" for message in messages)


def test_tool_calls_that_the_template_cannot_show_are_a_400(server):
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    response = server.chat(messages=messages)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "tools_unsupported")


def test_allowed_template_variables_and_the_salt_reach_their_ends(server):
    variables = {"enable_thinking": False, "add_generation_prompt": False, "thinking": None}
    request, _ = finish(server, server.start_chat(chat_template_kwargs=variables, cache_salt="tenant"))
    assert request.cache_salt == "tenant"
    assert finish(server, server.start_chat())[0].cache_salt is None


# ---- defaults -----------------------------------------------------------------------------------------------------------------


def defaults_of(tmp_path, **config):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    return read_defaults(tmp_path)


def test_without_a_generation_config_temperature_is_1(tmp_path):
    assert read_defaults(tmp_path).values == {"temperature": 1.0}
    assert "OpenAI" in str(defaults_of(tmp_path, eos_token_id=[1, 2]))


def test_the_models_generation_config_gives_the_defaults_and_requests_go_before_it(tmp_path):
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "min_p": None, "max_new_tokens": 9}
    defaults = defaults_of(tmp_path, **config)
    assert str(defaults) == "temperature 0.6, top_p 0.95, top_k 20, repetition_penalty 1.05 (generation_config.json)"
    with local_server(defaults=defaults) as server:
        request, _ = finish(server, server.start_chat(top_k=5, seed=1))
        assert request.sampling_params == SamplingParams(temperature=0.6, top_p=0.95, top_k=5, repetition_penalty=1.05, seed=1)
        request, _ = finish(server, server.ask("/v1/completions", {"prompt": "a", "seed": 1, "top_p": None}))
        assert (request.sampling_params.top_p, request.sampling_params.max_tokens) == (0.95, 16)


def test_a_model_that_does_not_sample_is_greedy(tmp_path):
    assert defaults_of(tmp_path, do_sample=False, temperature=0.7).values == {"temperature": 0.0}


@pytest.mark.parametrize("config", [{"temperature": 5}, {"top_p": "high"}, {"top_k": 1.5}])
def test_a_generation_config_out_of_range_is_refused_with_its_file(tmp_path, config):
    with pytest.raises(ModelFormatError, match=r"generation_config\.json.*t(emperature|op_p|op_k)"):
        defaults_of(tmp_path, **config)


# ---- bytes --------------------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_stream(server):
    with server.stream_chat(stream_options={"include_usage": True}) as response:
        uid = server.scheduler.hear_request().uid
        server.scheduler.send(DetokenizeMsg(uid, ord("a"), num_cached_tokens=4))
        server.scheduler.end(uid, "stop", token=256)
        golden = response.read().decode()
    golden = re.sub(r"chatcmpl-[0-9a-f]{32}", "ID", re.sub(r'"created":\d+', '"created":0', golden))
    if '"content":"a"' not in golden:
        raise AssertionError(golden)
    head = '{"id":"ID","created":0,"model":"byte-model","choices":['
    tail = ',"index":0,"logprobs":null}],"usage":null,"object":"chat.completion.chunk"}'
    usage = '{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}'
    assert golden == (
        f'data: {head}{{"delta":{{"role":"assistant","content":""}},"finish_reason":null{tail}\n\n'
        f'data: {head}{{"delta":{{"content":"a"}},"finish_reason":null{tail}\n\n'
        f'data: {head}{{"delta":{{}},"finish_reason":"stop"{tail}\n\n'
        f'data: {head}],"usage":{usage},"object":"chat.completion.chunk"}}\n\n'
        "data: [DONE]\n\n"
    )
