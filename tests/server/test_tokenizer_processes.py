"""Servers with --num-tokenizer 2: one process turns tokens into text and keeps account of all requests, two others only tokenize."""

from __future__ import annotations

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.fake_scheduler import STUCK
from tests.server.server_process import END_S, server_process, wait_until, write_byte_model
from tests.server.test_disconnects import check
from tests.server.test_health import SEEN_S, load, status_within, stopped
from tests.server.test_lifecycle import has_ended_with_an_error, requests_in_flight, says_who_died

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")

# Other tests keep the cores busy meanwhile, so no answer is expected within the half second of tests/server/test_health.py.
OPTIONS = {"num_tokenizer": 2, "step_timeout": 0.3, "drain_timeout": 0.3}
NAMES = ("tokenizer 1", "tokenizer 2", "detokenizer")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_byte_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="module")
def running(model_dir):
    """Shared by the tests that leave it as it was."""
    with server_process(model_dir, options=OPTIONS, FAKE_CONTEXT="30000000") as server:
        server.wait_until_ready()
        assert {"api", "scheduler", *NAMES} == set(server.children)
        yield server
        assert not server.errors


@pytest.fixture
def mortal(model_dir):
    with server_process(model_dir, options=OPTIONS) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def client(running):
    with httpx.Client(base_url=running.url, timeout=END_S) as client:
        yield client


def test_all_that_needs_a_tokenizer_works(client):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "n": 2}
    body = client.post("/v1/chat/completions", json=chat).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["xxx", "xxx"]
    assert body["usage"]["prompt_tokens"] == 2
    body = client.post("/v1/completions", json={"prompt": ["a", "bc", "def"], "max_tokens": 2, "echo": True}).json()
    assert [choice["text"] for choice in body["choices"]] == ["axx", "bcxx", "defxx"]
    assert client.post("/tokenize", json={"prompt": "Hé"}).json() == {"tokens": list("Hé".encode()), "count": 3}
    assert client.post("/detokenize", json={"tokens": [72, 105]}).json() == {"text": "Hi"}
    response = client.post("/detokenize", json={"tokens": [999]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_token_id")
    response = client.post("/v1/completions", json={"prompt": "", "max_tokens": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def begin(server, content, **fields):
    """A request that has been sent; its socket."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=END_S)
    data = json.dumps({"prompt": content, **fields}).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return client


def progress(client):
    return client.get("/health/progress").raise_for_status().json()


@pytest.mark.parametrize("num_clients", [1, pytest.param(4, marks=slow)])
def test_a_client_that_leaves_while_its_prompt_is_tokenized_never_reaches_the_scheduler(running, client, num_clients):
    before = progress(client)["num_steps"]
    leaving = [begin(running, "x" * 2_000_000, max_tokens=STUCK, stream=True) for _ in range(num_clients)]
    assert wait_until(lambda: progress(client)["num_requests"] == num_clients)
    for each in leaving:
        each.settimeout(0.2 / num_clients)
        with pytest.raises(TimeoutError):
            each.recv(1)
        each.close()
    assert wait_until(lambda: progress(client)["num_requests"] == 0)
    with ThreadPoolExecutor(2) as threads:  # each gets one of these, for they are longer, and has then done what was left behind
        later = [threads.submit(client.post, "/tokenize", json={"prompt": "y" * 2_200_000}, timeout=60) for _ in range(2)]
        assert [future.result().json()["count"] for future in later] == [2_200_000] * 2
    assert progress(client)["num_steps"] == before
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2


def test_a_huge_prompt_keeps_no_other_waiting(running, client):
    with begin(running, "x" * 5_000_000, max_tokens=1) as huge:
        assert wait_until(lambda: progress(client)["num_requests"] == 1)
        for _ in range(20):
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert progress(client)["num_requests"] == 1
        huge.settimeout(60)
        assert huge.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("is_loaded", [pytest.param(False, marks=slow), True], ids=["idle", "under load"])
@pytest.mark.parametrize("name", ["tokenizer 1", *(pytest.param(name, marks=slow) for name in NAMES[1:])])
def test_a_stopped_one_shows_in_health_until_it_goes_on_and_loses_nothing(running, client, name, is_loaded):
    body = {"prompt": "a", "max_tokens": 2}
    with load(client) as lines, ThreadPoolExecutor(4) as threads:
        answers = []
        with stopped(running, name):
            if is_loaded:
                answers = [threads.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=30) for _ in range(4)]
            assert status_within(client, "/health", 503, SEEN_S, END_S)
            error = client.get("/health").json()["error"]
            assert (error["code"], f"the {name} process" in error["message"]) == ("worker_silent", True)
            if name != "detokenizer":
                assert all(next(lines) is not None for _ in range(100))
        assert status_within(client, "/health", 200, SEEN_S, END_S)
        assert [future.result().json()["usage"]["completion_tokens"] for future in answers] == [2] * len(answers)
        assert all(next(lines) is not None for _ in range(100))
    assert wait_until(lambda: progress(client)["num_requests"] == 0)


@pytest.mark.parametrize("name", ["tokenizer 2", *(pytest.param(name, marks=slow) for name in ("tokenizer 1", "detokenizer"))])
def test_a_killed_one_ends_the_server_and_every_request(mortal, name):
    with requests_in_flight(mortal.url) as futures:
        os.kill(mortal.children[name], signal.SIGKILL)
        assert has_ended_with_an_error(*futures)
    assert says_who_died(mortal, name)


@slow
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_one_ends_an_idle_server(mortal, name):
    os.kill(mortal.children[name], signal.SIGKILL)
    assert says_who_died(mortal, name)


@slow
def test_a_killed_launcher_leaves_nothing_behind(mortal):
    assert len(mortal.sockets()) == 5
    with requests_in_flight(mortal.url) as futures:
        mortal.process.kill()
        assert has_ended_with_an_error(*futures)
    assert mortal.leaves_nothing_behind()


@slow
def test_a_broken_tokenizer_ends_the_server_with_the_cause(tmp_path):
    broken = write_byte_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with server_process(broken, options=OPTIONS) as server:
        assert server.wait_for_exit(30) == 1
        assert "tokenizer.json" in server.stderr
        assert server.leaves_nothing_behind()


@slow  # by default tests/server/test_disconnects.py does this with one tokenizer process
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_clients", "num_rounds"), [(60, 2), (500, 10)])
def test_clients_that_leave_leave_nothing_behind(model_dir, num_clients, num_rounds):
    with server_process(model_dir, scheduler="tests.server.fake_engine_process", options={"num_tokenizer": 2}) as server:
        server.wait_until_ready()
        check(server, num_clients, num_rounds)
        assert [line for line in server.errors if " INFO " not in line] == []  # a line for every ten seconds of work is none
