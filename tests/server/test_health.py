"""Whether the server lives, takes requests and gets on: while its processes are stopped and killed, and while it is busy."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from minisgl.errors import RequestError
from minisgl.utils.heartbeat import BEAT_S, SILENCE_S, Heart, PulseReader, make_heartbeat_file
from tests.server.fake_scheduler import STUCK
from tests.server.local_server import local_server
from tests.server.server_process import END_S, server_process, wait_until, write_byte_model

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")

SEEN_S = 5.0
"""A stopped process shows within so many seconds."""
PROMPT_S = 0.5
"""Health answers within so many seconds."""
STEP_TIMEOUT_S = 0.3
GAP_S = 1.5
"""Other streams wait for no longer; the tokenizer takes three times as long, in a thread that holds no lock."""
ROUTES = ("/health", "/health/ready", "/health/progress")


# ---- signs of life ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    descriptor = make_heartbeat_file(2)
    yield descriptor
    os.close(descriptor)


def test_a_worker_that_beats_is_not_silent_and_one_that_has_not_begun_is(memory):
    Heart(memory, 1).start()
    first, second = PulseReader(memory).read()
    assert first.is_silent
    assert not second.is_silent
    assert second.silence_s < SILENCE_S - BEAT_S
    assert not second.is_stuck


def test_a_step_is_stuck_once_it_runs_for_longer_than_is_allowed(memory):
    heart, reader = Heart(memory, 0), PulseReader(memory)
    heart.set_step_timeout(0.05)
    heart.begin_step()
    assert not reader.read()[0].is_stuck
    assert wait_until(lambda: reader.read()[0].is_stuck)
    heart.begin_step()
    assert (reader.read()[0].is_stuck, reader.read()[0].num_steps) == (False, 2)
    assert wait_until(lambda: reader.read()[0].is_stuck)
    heart.end_step()
    assert (reader.read()[0].is_stuck, reader.read()[0].step_s) == (False, 0)
    assert reader.read()[1].num_steps == 0


def test_a_step_without_a_limit_is_never_stuck(memory):
    heart = Heart(memory, 0)
    heart.begin_step()
    assert not PulseReader(memory).read()[0].is_stuck


# ---- starting, draining, closing ----------------------------------------------------------------------------------------------


def statuses(client):
    return [client.get(path).status_code for path in ROUTES]


def test_health_follows_the_doors():
    with local_server(is_open=False) as server:
        assert statuses(server.client) == [503, 503, 503]
        assert server.client.get("/health").json()["error"]["code"] == "starting"
        server.call_in_loop(server.frontend.open_doors)
        assert statuses(server.client) == [200, 200, 200]
        assert server.client.get("/health/progress").json() == {"num_requests": 0, "num_steps": 0, "status": "ok"}
        server.call_in_loop(server.frontend.drain, RequestError("leaving", status=503, code="draining"))
        assert statuses(server.client) == [200, 503, 200]
        assert server.chat().status_code == 503
        server.call_in_loop(server.frontend.close_doors, RequestError("it died", status=503, code="server_stopped"))
        assert statuses(server.client) == [503, 503, 503]


# ---- processes ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server that all tests share; the fake scheduler's context is larger than the longest text that is sent."""
    model = write_byte_model(tmp_path_factory.mktemp("byte-model"))
    with server_process(model, options={"step_timeout": STEP_TIMEOUT_S}, FAKE_CONTEXT="30000000") as server:
        server.wait_until_ready()
        yield server
        assert "Traceback" not in "".join(server.errors)


@pytest.fixture
def client(running):
    with httpx.Client(base_url=running.url, timeout=END_S) as client:
        yield client


def status_within(client, path, status, seconds, prompt_s=PROMPT_S):
    """Poll until the route answers with this status, each time within `prompt_s`."""
    start = time.monotonic()

    def answers():
        asked = time.monotonic()
        found = client.get(path).status_code
        assert time.monotonic() - asked < prompt_s
        return found == status

    return wait_until(answers, seconds - (time.monotonic() - start))


@contextlib.contextmanager
def stopped(server, name):
    os.kill(server.children[name], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.children[name], signal.SIGCONT)


@contextlib.contextmanager
def load(client):
    """A stream that has begun and goes on."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


CASES = [
    pytest.param("tokenizer", False, id="tokenizer, idle", marks=pytest.mark.slow),
    pytest.param("scheduler", True, id="scheduler, under load"),
    pytest.param("tokenizer", True, id="tokenizer, under load", marks=pytest.mark.slow),
    pytest.param("scheduler", False, id="scheduler, idle", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "is_loaded"), CASES)
def test_a_stopped_process_shows_in_health_until_it_goes_on(running, client, name, is_loaded):
    with load(client) if is_loaded else contextlib.nullcontext() as lines:
        with stopped(running, name):
            assert status_within(client, "/health", 503, SEEN_S)
            error = client.get("/health").json()["error"]
            assert (error["code"], name in error["message"]) == ("worker_silent", True)
            assert statuses(client) == [503, 503, 503]
        assert status_within(client, "/health", 200, SEEN_S)
        if lines is not None:
            assert all(next(lines) is not None for _ in range(100))
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("is_loaded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["idle", "under load"])
def test_a_stopped_api_answers_again_when_it_goes_on(running, client, is_loaded):
    with load(client) if is_loaded else contextlib.nullcontext() as lines:
        with stopped(running, "api"), pytest.raises(httpx.TimeoutException):
            httpx.get(f"{running.url}/health", timeout=0.3)
        assert status_within(client, "/health", 200, SEEN_S)
        if lines is not None:
            assert all(next(lines) is not None for _ in range(100))


@pytest.mark.slow
@pytest.mark.parametrize("is_loaded", [False, True], ids=["idle", "under load"])
@pytest.mark.parametrize("name", ["scheduler", "scheduler rank 1"])
def test_a_stopped_rank_shows_in_health_until_it_goes_on(tmp_path, name, is_loaded):
    model = write_byte_model(tmp_path / "model")
    with server_process(model, scheduler="tests.server.fake_engine_process", options={"tp": 2}) as server:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=END_S) as client:
            body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "seed": 0}
            with ThreadPoolExecutor(1) as thread:
                answer = thread.submit(client.post, "/v1/completions", json=body) if is_loaded else None
                if is_loaded:
                    assert wait_until(lambda: client.get("/health/progress").raise_for_status().json()["num_steps"] > 10)
                with stopped(server, name):
                    assert status_within(client, "/health", 503, SEEN_S)
                    assert client.get("/health").json()["error"]["message"].startswith(f"the {name} process ")
                assert status_within(client, "/health", 200, SEEN_S)
                if answer is not None:
                    assert answer.result(30).json()["usage"]["completion_tokens"] == 200
            assert client.post("/v1/completions", json={**body, "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2


BURST = """
import socket, sys
host, port = sys.argv[1].split(":")
body = b'{"prompt":"a","max_tokens":2}'
request = b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body
num_right = 0
for _ in range(int(sys.argv[2]) // 250):
    clients = [socket.create_connection((host, int(port)), timeout=100) for _ in range(250)]
    for client in clients:
        client.sendall(request)
    num_right += sum(client.recv(12) == b"HTTP/1.1 200" for client in clients)
    for client in clients:
        client.close()
print(num_right)
"""


@pytest.mark.parametrize("num_requests", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_health_and_streams_go_on_during_a_burst_of_requests(running, client, num_requests):
    """250 of them at any time."""
    command = [sys.executable, "-c", BURST, running.url.removeprefix("http://"), str(num_requests)]
    with load(client) as lines, ThreadPoolExecutor(2) as threads:
        burst = threads.submit(subprocess.run, command, capture_output=True, check=True)
        gap = threads.submit(longest_gap, lines, burst)
        assert slowest_health(client, burst) < PROMPT_S
        assert gap.result(END_S) < GAP_S
        assert int(burst.result().stdout) == num_requests
    assert wait_until(lambda: client.get("/health/progress").json()["num_requests"] == 0)


def test_a_stuck_step_shows_in_progress_only(running, client):
    with ThreadPoolExecutor(1) as thread:
        stuck = thread.submit(client.post, "/v1/completions", json={"prompt": "a", "max_tokens": STUCK})
        assert status_within(client, "/health/progress", 503, SEEN_S)
        error = client.get("/health/progress").json()["error"]
        assert (error["code"], "--step-timeout" in error["message"]) == ("step_stuck", True)
        assert [client.get(path).status_code for path in ROUTES[:2]] == [200, 200]
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert client.get("/health/progress").status_code == 200
        assert stuck.result(END_S).json()["usage"]["completion_tokens"] == STUCK


def slowest_health(client, future):
    """Ask until the future is done; the longest answer in seconds."""
    slowest = 0.0
    while not future.done():
        asked = time.monotonic()
        assert client.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - asked)
        threading.Event().wait(0.05)
    return slowest


def longest_gap(lines, future):
    """Read a stream until the future is done; the longest time between two events in seconds."""
    longest, last = 0.0, time.monotonic()
    while not future.done():
        next(lines)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


def repeated(start, middle, end, num_bytes=16_000_000):
    """A body of about so many bytes."""
    return start + middle * (num_bytes // len(middle)) + end


POSTER = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=100)
connection.request("POST", sys.argv[2], sys.stdin.buffer.read())
response = connection.getresponse()
answer = response.read()
print(response.status)
print(answer[-100:].decode())
"""


def post_elsewhere(url, route, content):
    """POST in a process of its own, for one that reads a huge answer would keep this one from asking; status and end of the answer."""
    command = [sys.executable, "-c", POSTER, url.removeprefix("http://"), route]
    status, end = subprocess.run(command, input=content, capture_output=True, check=True).stdout.decode().split("\n", 1)
    return int(status), end.rstrip("\n")


HUGE_CASES = [
    pytest.param("/v1/completions", (b'{"max_tokens":1,"prompt":"', b"x", b'"}', 5_000_000), 200, id="5 MB"),
    pytest.param("/v1/completions", (b'{"max_tokens":1,"prompt":"', b"x", b'"}'), 200, id="16 MB", marks=pytest.mark.slow),
    pytest.param("/tokenize", (b'{"prompt":"', b"1,", b'"}', 2_500_000), 200, id="only ids"),
    pytest.param("/tokenize", (b'{"prompt":"', b"x", b'"}'), 200, id="16 MB, only ids", marks=pytest.mark.slow),
    pytest.param("/detokenize", (b'{"tokens":[', b"97,", b"97]}", 3_000_000), 200, id="only text", marks=pytest.mark.slow),
    pytest.param("/detokenize", (b'{"tokens":[', b"97,", b"97]}"), 413, id="16 MB of ids"),
    pytest.param("/v1/completions", (b'{"prompt":[', b"[],", b"[]]}"), 413, id="16 MB of empty prompts"),
    pytest.param("/v1/completions", (b'{"prompt":[', b'"\\"",', b'""]}'), 413, id="16 MB of short texts", marks=pytest.mark.slow),
    pytest.param(
        "/v1/chat/completions", (b'{"messages":[', b'{"role":"user"},', b"1]}"), 413, id="16 MB of messages", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("route", "body", "status"), HUGE_CASES)
def test_health_and_streams_go_on_while_a_huge_body_is_handled(running, client, route, body, status):
    content = repeated(*body)
    with load(client) as lines, ThreadPoolExecutor(2) as threads:
        huge = threads.submit(post_elsewhere, running.url, route, content)
        gap = threads.submit(longest_gap, lines, huge)
        assert slowest_health(client, huge) < PROMPT_S
        assert gap.result(END_S) < GAP_S
    assert huge.result()[0] == status
    if status == 413:
        assert '"code":"request_too_large"' in huge.result()[1]
    elif route == "/tokenize":
        assert huge.result()[1].endswith(f'],"count":{len(content) - len(body[0] + body[2])}}}')


def test_a_prompt_that_can_never_fit_is_refused_untokenized(tmp_path):
    with server_process(write_byte_model(tmp_path / "model"), FAKE_CONTEXT="1000") as server:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=END_S) as client, ThreadPoolExecutor(1) as thread:
            for _ in range(2):
                huge = thread.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "x" * 16_000_000}, timeout=END_S)
                assert slowest_health(client, huge) < PROMPT_S
                assert (huge.result().status_code, huge.result().json()["error"]["code"]) == (413, "request_too_large")
