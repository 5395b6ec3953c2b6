"""POST /v1/chat/completions against a scheduler that the test plays: shapes, endings, refusals, disconnects."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import RequestError
from minisgl.message import BatchTokenizerMsg, DetokenizeMsg
from tests.server.local_server import CONTEXT, MODEL, POOL, WAIT, chat_body, local_server

URL = "/v1/chat/completions"


def events(lines):
    """The JSON of each event, and whether [DONE] was the last."""
    payloads = [line.removeprefix("data: ") for line in lines if line]
    is_done = payloads[-1:] == ["[DONE]"]
    return [json.loads(payload) for payload in payloads[: len(payloads) - is_done]], is_done


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_a_plain_answer_has_openais_shape(server):
    answer = server.start_chat(model=MODEL, max_tokens=9)
    request = server.scheduler.hear_request()
    assert bytes(request.input_ids.tolist()) == b"Hello"
    assert request.sampling_params.max_tokens == 9
    server.scheduler.say(request.uid, "Hé")
    server.scheduler.end(request.uid, "length", token=ord("!"))
    response = answer.result(WAIT)
    body = response.json()
    assert response.status_code == 200
    assert abs(body.pop("created") - time.time()) < 60
    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hé!", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}},
    }


def play_stream(server, text="Hi", **body):
    with server.stream_chat(**body) as response:
        request = server.scheduler.hear_request()
        server.scheduler.say(request.uid, text)
        server.scheduler.end(request.uid, "stop", token=256)
        return response, *events(response.iter_lines())


def test_a_stream_has_openais_shape(server):
    response, chunks, is_done = play_stream(server)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert is_done
    assert {json.dumps([c["id"], c["created"], c["model"], c["object"], len(c["choices"])]) for c in chunks} == {
        json.dumps([chunks[0]["id"], chunks[0]["created"], MODEL, "chat.completion.chunk", 1])
    }
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {(choice["index"], choice["logprobs"]) for choice in choices} == {(0, None)}
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == "Hi"
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


def test_ids_differ_from_request_to_request(server):
    assert play_stream(server)[1][0]["id"] != play_stream(server)[1][0]["id"]


def test_an_answer_that_ends_at_once_has_a_role_and_an_ending(server):
    _, chunks, _ = play_stream(server, text="")
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({}, "stop"),
    ]


def test_usage_comes_in_one_more_chunk_if_it_is_asked_for(server):
    _, chunks, is_done = play_stream(server, stream_options={"include_usage": True})
    assert is_done
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_does_not_come_unasked(server, options):
    _, chunks, _ = play_stream(server, stream_options=options)
    assert not any("usage" in chunk or not chunk["choices"] for chunk in chunks)


def test_a_stop_string_over_several_tokens_gives_the_same_text_and_usage_streamed_and_plain(server):
    body = {"stop": ["beta gamma"], "max_tokens": 50}
    text = "alpha beta gamma delta"
    plain = server.start_chat(**body)
    first = server.scheduler.hear_request()
    server.scheduler.say(first.uid, text)
    assert server.scheduler.hear_abort() == first.uid
    answer = plain.result(WAIT).json()
    with server.stream_chat(**body, stream_options={"include_usage": True}) as response:
        second = server.scheduler.hear_request()
        server.scheduler.say(second.uid, text)
        assert server.scheduler.hear_abort() == second.uid
        chunks, is_done = events(response.iter_lines())
    streamed = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert streamed == answer["choices"][0]["message"]["content"] == "alpha "
    assert chunks[-2]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] == len("alpha beta gamma")
    assert is_done


def test_sampling_fields_reach_the_scheduler(server):
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 2**64 - 1, "frequency_penalty": -1.0}
    fields |= {"presence_penalty": 1.0, "repetition_penalty": 1.5, "min_tokens": 1, "ignore_eos": True, "skip_special_tokens": False}
    answer = server.start_chat(**fields, stop="END", stop_token_ids=[9], logit_bias={"5": -3.5}, max_completion_tokens=4)
    request = server.scheduler.hear_request()
    server.scheduler.end(request.uid)
    assert answer.result(WAIT).status_code == 200
    wanted = SamplingParams(**fields, stop=("END",), stop_token_ids=(9,), logit_bias={5: -3.5}, max_tokens=4)
    assert request.sampling_params == wanted


def test_a_request_without_a_seed_gets_one_and_null_fields_are_defaults(server):
    seeds = set()
    for _ in range(2):
        names = ["max_tokens", "temperature", "stop", "n", "tools", "logprobs", "response_format", "seed", "stream", "user"]
        answer = server.start_chat(**dict.fromkeys(names))
        request = server.scheduler.hear_request()
        server.scheduler.end(request.uid)
        assert answer.result(WAIT).status_code == 200
        seeds.add(request.sampling_params.seed)
        assert request.sampling_params == SamplingParams(seed=request.sampling_params.seed, temperature=1.0)
    assert len(seeds) == 2
    assert None not in seeds


def test_harmless_and_neutral_fields_are_accepted(server):
    fields = {"user": "u", "metadata": {"a": "b"}, "store": False, "n": 1, "logprobs": False, "response_format": {"type": "text"}}
    answer = server.start_chat(**fields, tools=[], tool_choice="none", stop=[])
    server.scheduler.end(server.scheduler.hear_request().uid)
    assert answer.result(WAIT).status_code == 200


REFUSED_FIELDS = [
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": True}, "n"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": "no"}}, "chat_template_kwargs"),
    ({"allow_control_tokens": 1}, "allow_control_tokens"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": []}, "functions"),
    ({"response_format": {"type": "wizard"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"foo": "bar", "$ref": "#"}}}, "response_format"),
    ({"guided_regex": "foo**"}, "guided_regex"),
    ({"no such field": 1}, "no such field"),
    ({"stream_options": {"include_usage": "True"}, "stream": True}, "stream_options"),
    ({"stream_options": {"extra": True}, "stream": True}, "stream_options"),
    ({"stream": 1}, "stream"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -160}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 9999999999999999999999}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "0"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": -1}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"user": 5}, "user"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "extra": 1}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 10**300}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "raise"}]}, "messages"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED_FIELDS, ids=lambda value: str(value)[:40])
def test_a_field_that_cannot_be_served_is_a_400_that_names_it(server, fields, param, stream):
    response = server.chat(**{"stream": stream, **fields})
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"] or error["code"] == "chat_template_error"


def test_stream_options_without_a_stream_are_a_400(server):
    response = server.chat(stream_options={"include_usage": True})
    assert (response.status_code, error_of(response)["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"messages":[{"role":"user","content":"cut \\ud83d"}]}',
        b'{"messages":[{"role":"user","content":"a"}],"stop":"\\ud83d"}',
        b'{"messages":[{"role":"user","content":"a"}],"model":"\\ud83d"}',
        b'{"messages":[{"role":"user","content":"a"}],"user":"\\ud83d"}',
        b'{"messages":[{"role":"user","content":"a"}],"cache_salt":"\\ud83d"}',
        b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"thinking":"\\ud83d"}}',
        b'{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema","schema":' + b'{"oneOf":[' * 10_000,
        b'{"messages":[{"role":"user","content":"a"}],"response_format":' + b'{"oneOf":' * 500 + b"1" + b"}" * 500 + b"}",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":Infinity}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}',
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":' + b"9" * 5000 + b"}",
        b'{"messages":[{"role":"user","content":"a"}],"tools":' + b"[" * 100_000,
        b'{"messages":[{"role":"user","content":"a","tool_calls":[{"x":' + b"[" * 900 + b"]" * 900 + b"}]}]}",
        b'{"messages":[{"role":"user","content":"a"}],"messages_\\ud800":1}',
    ],
    ids=lambda body: repr(body[:60]),
)
def test_a_body_that_is_no_request_is_a_400(server, body):
    response = server.client.post(URL, content=body)
    assert (response.status_code, error_of(response)["type"]) == (400, "invalid_request_error")


def test_the_template_speaks_in_its_own_words(server):
    assert "no such talk" in error_of(server.chat(content="raise"))["message"]


def test_another_model_is_a_404(server):
    response = server.chat(model="gpt-4\nERROR fake")
    assert response.status_code == 404
    assert (error_of(response)["code"], error_of(response)["param"]) == ("model_not_found", "model")


def test_a_long_message_is_quoted_in_part(server):
    response = server.chat(model="m" * 1_000_000)
    assert response.status_code == 404
    assert len(response.content) < 2000


@pytest.mark.parametrize(("num_tokens", "limit"), [(POOL, POOL), (CONTEXT, CONTEXT)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_can_never_fit_is_a_400_with_both_numbers_before_any_header(server, num_tokens, limit, stream):
    response = server.chat(content="x" * num_tokens, stream=stream)
    assert response.status_code == 400
    assert str(num_tokens) in error_of(response)["message"]
    assert str(limit) in error_of(response)["message"]


def test_a_body_that_is_too_long_is_a_413(server):
    response = server.client.post(URL, content=b" " * (16 * 1024 * 1024 + 1))
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


def test_a_client_that_leaves_a_stream_aborts_it(server):
    with server.stream_chat(max_tokens=4000):
        request = server.scheduler.hear_request()
        server.scheduler.say(request.uid, "a")
    assert server.scheduler.hear_abort() == request.uid


def test_a_client_that_leaves_before_the_answer_aborts_it(server):
    body = json.dumps(chat_body(max_tokens=4000)).encode()
    with raw_request(server, body):
        request = server.scheduler.hear_request()
    assert server.scheduler.hear_abort() == request.uid


def test_each_of_many_clients_that_leave_is_aborted_once(server):
    with contextlib.ExitStack() as streams:
        for _ in range(50):
            streams.enter_context(server.stream_chat(max_tokens=4000))
        uids = {server.scheduler.hear_request().uid for _ in range(50)}
        for uid in uids:
            server.scheduler.say(uid, "a")
    assert {server.scheduler.hear_abort() for _ in range(50)} == uids
    assert server.hears_no_abort()


def test_an_answer_that_was_read_to_its_end_is_not_aborted(server):
    play_stream(server)
    assert server.hears_no_abort()


@contextlib.contextmanager
def raw_request(server, body):
    url = server.client.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection


def test_a_plain_answer_that_breaks_off_is_a_500(server):
    answer = server.start_chat()
    request = server.scheduler.hear_request()
    server.scheduler.say(request.uid, "par")
    server.scheduler.end(request.uid, "error", error="the cause")
    response = answer.result(WAIT)
    assert (response.status_code, error_of(response)["message"]) == (500, "the cause")


def test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_finish_reason(server):
    with server.stream_chat() as response:
        request = server.scheduler.hear_request()
        server.scheduler.say(request.uid, "par")
        server.scheduler.end(request.uid, "error", error="the cause")
        chunks, is_done = events(response.iter_lines())
    assert not is_done
    assert chunks[-1] == {"error": {"message": "the cause", "type": "server_error", "param": None, "code": "internal_error"}}
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == "par"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def test_a_slow_reader_gets_fewer_and_longer_pieces():
    with local_server() as server, server.stream_chat() as response:
        request = server.scheduler.hear_request()
        text = "x" * 10_000
        # More than the sockets between us hold, while nobody reads.
        for _ in range(5):
            server.scheduler.send(BatchTokenizerMsg([DetokenizeMsg(request.uid, token) for token in text.encode()]))
        server.scheduler.end(request.uid)
        chunks, is_done = events(response.iter_lines())
    assert is_done
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert len("".join(texts)) == 50_000
    assert len(texts) < 30_000


def test_before_all_processes_are_ready_requests_are_a_503():
    with local_server(is_open=False) as server:
        for response in (server.chat(), server.chat(stream=True), server.client.get("/health")):
            assert (response.status_code, error_of(response)["code"]) == (503, "starting")


def test_when_a_process_has_died_all_pending_requests_end_with_an_error_and_new_ones_are_refused():
    with local_server() as server:
        plain = server.start_chat()
        server.scheduler.hear_request()
        with server.stream_chat() as response:
            server.scheduler.say(server.scheduler.hear_request().uid, "par")
            lines = response.iter_lines()
            text = ""
            while text != "par":
                text += "".join(chunk["choices"][0]["delta"]["content"] for chunk in events([next(lines)])[0])
            server.call_in_loop(server.frontend.close_doors, RequestError("it died", status=503, code="server_stopped"))
            chunks, is_done = events(lines)
        assert not is_done
        assert chunks == [{"error": {"message": "it died", "type": "server_error", "param": None, "code": "server_stopped"}}]
        assert error_of(plain.result(WAIT))["message"] == "it died"
        assert plain.result().status_code == server.chat().status_code == server.client.get("/health").status_code == 503
