"""Whether the server lives, takes requests and gets on: while its processes are stopped and killed, and while it is busy."""

from __future__ import annotations

import contextlib
import os
import signal
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


def status_within(client, path, status, seconds):
    """Poll until the route answers with this status, each time at once."""
    start = time.monotonic()

    def answers():
        asked = time.monotonic()
        found = client.get(path).status_code
        assert time.monotonic() - asked < PROMPT_S
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
    pytest.param("tokenizer", False, id="tokenizer, idle"),
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


def test_a_stopped_api_answers_again_when_it_goes_on(running, client):
    with stopped(running, "api"), pytest.raises(httpx.TimeoutException):
        httpx.get(f"{running.url}/health", timeout=0.3)
    assert status_within(client, "/health", 200, SEEN_S)


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


HUGE_CASES = [
    pytest.param("/v1/completions", 5_000_000, id="5 MB"),
    pytest.param("/v1/completions", 27_000_000, id="27 MB", marks=pytest.mark.slow),
    pytest.param("/tokenize", 5_000_000, id="only ids", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("route", "num_bytes"), HUGE_CASES)
def test_health_and_streams_go_on_while_a_huge_prompt_is_tokenized(running, client, route, num_bytes):
    body = {"prompt": "x" * num_bytes, **({} if route == "/tokenize" else {"max_tokens": 1})}
    with load(client) as lines, ThreadPoolExecutor(2) as threads:
        huge = threads.submit(httpx.post, f"{running.url}{route}", json=body, timeout=100)
        gap = threads.submit(longest_gap, lines, huge)
        assert slowest_health(client, huge) < PROMPT_S
        assert gap.result(END_S) < GAP_S
        assert huge.result().status_code == 200


def test_a_prompt_that_can_never_fit_is_refused_untokenized(tmp_path):
    with server_process(write_byte_model(tmp_path / "model"), FAKE_CONTEXT="1000") as server:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=END_S) as client, ThreadPoolExecutor(1) as thread:
            for _ in range(3):
                huge = thread.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "x" * 27_000_000}, timeout=END_S)
                assert slowest_health(client, huge) < PROMPT_S
                assert (huge.result().status_code, huge.result().json()["error"]["code"]) == (413, "request_too_large")
