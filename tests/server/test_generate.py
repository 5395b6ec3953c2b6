"""POST /generate against a scheduler that the test plays."""

from __future__ import annotations

import json

import pytest

from minisgl.core import SamplingParams
from minisgl.message import PromptLogprobsMsg
from tests.server.local_server import MODEL, WAIT, scored

URL = "/generate"
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("prompt", [{"prompt": "ab"}, {"input_ids": [97, 98]}])
def test_a_plain_answer_has_text_ids_ending_and_usage(server, prompt):
    fields = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "seed": 1, "stop": "x", "min_tokens": 1}
    answer = server.ask(URL, {**prompt, "sampling_params": fields, "model": MODEL, "cache_salt": "s"})
    request = server.scheduler.hear_request()
    assert request.input_ids.tolist() == [97, 98]
    assert (request.sampling_params, request.cache_salt) == (SamplingParams(**{**fields, "stop": ("x",)}), "s")
    server.scheduler.say(request.uid, "hi")
    server.scheduler.end(request.uid, "stop", token=256)
    body = answer.result(WAIT).json()
    assert body.pop("id").startswith("gen-")
    assert body == {"text": "hi", "token_ids": [104, 105, 256], "finish_reason": "stop", "usage": USAGE}


def test_a_stream_brings_ids_as_they_come_and_ends_with_the_usage(server):
    with server.client.stream("POST", URL, json={"prompt": "ab", "stream": True}) as response:
        request = server.scheduler.hear_request()
        assert (request.sampling_params.max_tokens, request.sampling_params.temperature) == (None, 1.0)
        server.scheduler.say(request.uid, "é")
        server.scheduler.end(request.uid, "stop", token=256)
        events = list(server.events(response))
    assert "".join(event["text"] for event in events) == "é"
    assert [token for event in events for token in event["token_ids"]] == [0xC3, 0xA9, 256]
    assert (events[0]["text"], events[0]["token_ids"]) == ("", [])
    assert [event["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert [event["usage"] for event in events] == [None] * (len(events) - 1) + [USAGE]
    assert len({event["id"] for event in events}) == 1


def test_the_bytes_of_a_stream(server):
    with server.client.stream("POST", URL, json={"prompt": "ab", "stream": True}) as response:
        uid = server.scheduler.hear_request().uid
        blocks = response.iter_bytes()
        found = next(blocks)
        server.scheduler.say(uid, "x")
        while b'"x"' not in found:
            found += next(blocks)
        server.scheduler.end(uid, "length", token=ord("\n"))
        found += b"".join(blocks)
    name = json.loads(found.split(b"\n\n")[0].removeprefix(b"data: "))["id"].encode()
    usage = b'{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}'
    assert found == (
        b'data: {"id":"%b","text":"","token_ids":[],"finish_reason":null,"usage":null}\n\n'
        b'data: {"id":"%b","text":"x","token_ids":[120],"finish_reason":null,"usage":null}\n\n'
        b'data: {"id":"%b","text":"\\n","token_ids":[10],"finish_reason":"length","usage":%b}\n\n'
        b"data: [DONE]\n\n"
    ) % (name, name, name, usage)


def test_log_probabilities_of_output_and_prompt(server):
    answer = server.ask(URL, {"prompt": "pq", "sampling_params": {"logprobs": 1, "prompt_logprobs": 1}})
    uid = server.scheduler.hear_request().uid
    server.scheduler.send(PromptLogprobsMsg(uid, [scored(ord("q"), 1)]))
    server.scheduler.say_scored(uid, "a", 1)
    server.scheduler.end(uid, "stop", token=256)
    body = answer.result(WAIT).json()
    assert [entry["token"] for entry in body["prompt_logprobs"]] == ["q"]
    assert [(entry["token"], entry["logprob"], len(entry["top_logprobs"])) for entry in body["logprobs"]] == [("a", -0.97, 1)]


def test_a_stop_string_ends_it_and_the_ids_show_why(server):
    answer = server.ask(URL, {"prompt": "ab", "sampling_params": {"stop": "END"}})
    uid = server.scheduler.hear_request().uid
    server.scheduler.say(uid, "aENDb")
    assert server.scheduler.hear_abort() == uid
    body = answer.result(WAIT).json()
    assert (body["text"], bytes(body["token_ids"]), body["finish_reason"]) == ("a", b"aEND", "stop")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "input_ids": [1]}, 400, "prompt"),
        ({"prompt": ["a"]}, 400, "prompt"),
        ({"input_ids": [257]}, 400, "prompt"),
        ({"input_ids": []}, 400, "prompt"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, 400, "sampling_params"),
        ({"prompt": "a", "sampling_params": {"max_tokens": 0}}, 400, "max_tokens"),
        ({"prompt": "a", "sampling_params": {"prompt_logprobs": 1}, "stream": True}, 400, "prompt_logprobs"),
        ({"prompt": "a", "temperature": 1}, 400, "temperature"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(server, body, status, param):
    response = server.client.post(URL, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
