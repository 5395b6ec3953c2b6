"""The routes around the generating ones, and the one shape of errors."""

from __future__ import annotations

import json

import pytest

from minisgl import __version__
from minisgl.message import BatchTokenizerMsg, CacheFlushedMsg, FlushBackendMsg
from tests.server.local_server import CONTEXT, MODEL, WAIT

LONGEST_TOKEN = len("<|end|>")


def test_health(server):
    response = server.client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_models(server):
    response = server.client.get("/v1/models")
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert server.client.get(f"/v1/models/{MODEL}").json() == body["data"][0]
    assert isinstance(body["data"][0].pop("created"), int)
    assert body == {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "minisgl"}]}


@pytest.mark.parametrize("name", ["", "gpt-4", f"{MODEL}/x", "x%1B[31m"])
def test_another_model_is_not_found(server, name):
    response = server.client.get(f"/v1/models/{name}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_version(server):
    assert server.client.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
def test_what_is_not_there_says_so_in_the_one_shape(server, method, path, status, code):
    response = server.client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/tokenize", "/detokenize", "/abort"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"no such field":1}', b'{"prompt":"\\ud83d"}', b'{"prompt":"\xff"}'])
def test_a_body_that_is_no_request_is_a_400(server, path, body):
    response = server.client.post(path, content=body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


# ---- tokenize, detokenize -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"prompt": "Hé"}, list("Hé".encode())),
        ({"prompt": "a<|end|>"}, [97, 256]),
        ({"prompt": "a", "add_special_tokens": False, "model": MODEL}, [97]),
        ({"messages": [{"role": "user", "content": "Hi"}]}, list(b"Hi")),
        ({"messages": [{"role": "user", "content": "a<|end|>"}]}, list(b"a<|end|>")),
        ({"messages": [{"role": "user", "content": "a<|end|>"}], "allow_control_tokens": True}, [97, 256]),
        ({"prompt": "x" * CONTEXT * 2}, [120] * CONTEXT * 2),
    ],
)
def test_tokenize(server, body, ids):
    response = server.client.post("/tokenize", json=body)
    assert (response.status_code, response.json()) == (200, {"tokens": ids, "count": len(ids)})


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "messages": []}, 400, "prompt"),
        ({"prompt": ["a"]}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "raise"}]}, 400, "messages"),
        ({"prompt": "a", "chat_template_kwargs": {}}, 400, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": False}, 400, "add_special_tokens"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({"prompt": "x" * (CONTEXT * LONGEST_TOKEN + 1)}, 413, "prompt"),
    ],
)
def test_tokenize_refuses(server, body, status, param):
    response = server.client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"tokens": list("Hé".encode())}, "Hé"),
        ({"tokens": [97, 256]}, "a<|end|>"),
        ({"tokens": [97, 256], "skip_special_tokens": True}, "a"),
        ({"tokens": [0xE9]}, "�"),
    ],
)
def test_detokenize(server, body, text):
    response = server.client.post("/detokenize", json=body)
    assert (response.status_code, response.json()) == (200, {"text": text})


@pytest.mark.parametrize("tokens", [[], [-1], [257], [5279552648203111001], [2**70], [1.5], [True], "a", None])
def test_detokenize_refuses(server, tokens):
    response = server.client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400


# ---- flush, abort -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_running", "status"), [(0, 200), (3, 409)])
def test_flush_cache_tells_what_the_scheduler_says(server, num_running, status):
    answer = server.ask("/flush_cache")
    order = server.scheduler.hear()
    assert isinstance(order, FlushBackendMsg)
    server.scheduler.send(BatchTokenizerMsg([CacheFlushedMsg(order.uid, num_running)]))
    response = answer.result(WAIT)
    assert response.status_code == status
    assert response.json() == {"status": "ok"} if status == 200 else response.json()["error"]["type"] == "conflict_error"


def test_abort_of_an_unknown_id_ends_nothing(server):
    assert server.client.post("/abort", json={"id": "chatcmpl-nobody"}).json() == {"aborted": 0}


def test_what_is_being_aborted_is_not_counted_again(server):
    with server.client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 9, "stream": True}) as response:
        uid = server.scheduler.hear_request().uid
        server.scheduler.say(uid, "x")
        lines = response.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        counts = [server.client.post("/abort", json={"id": name}).json()["aborted"] for _ in range(2)]
        assert counts[0] == 1
        assert counts[1] == 0
        assert list(lines)[-2] == "data: [DONE]"
    assert server.scheduler.hear_abort() == uid


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/chat/completions", {}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(server, path, body, param):
    response = server.client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert param in error["message"]


def test_abort_ends_all_choices_of_a_stream_which_reads_to_its_end(server):
    with server.stream_chat(n=2, stream_options={"include_usage": True}) as response:
        uids = [server.scheduler.hear_request().uid for _ in range(2)]
        server.scheduler.say(uids[0], "ab")
        events = server.events(response)
        seen = [next(events)]
        while "b" not in str(seen[-1]["choices"][0]["delta"].get("content")):
            seen.append(next(events))
        assert server.client.post("/abort", json={"id": seen[0]["id"]}).json() == {"aborted": 2}
        seen += list(events)
    assert [server.scheduler.hear_abort() for _ in range(2)] == uids
    endings = {choice["index"]: choice["finish_reason"] for event in seen for choice in event["choices"] if choice["finish_reason"]}
    assert endings == {0: "abort", 1: "abort"}
    assert seen[-1]["usage"]["completion_tokens"] == 2
    assert server.hears_no_abort()
