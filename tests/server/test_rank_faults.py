"""One of two ranks is killed or stopped, at start, idle, in prefill or in decode: every request ends with an error, all processes go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.faulty_rank_process import FULL, LONG, SIGNALLED
from tests.server.server_process import END_S, START_S, server_process, wait_until

pytestmark = [pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc"), pytest.mark.timeout(300)]

PROCESS = "tests.server.faulty_rank_process"
NAMES = ("scheduler", "scheduler rank 1")
DOING = {
    "start": "while the ranks were starting",
    "idle": "while it waited for a message",
    "prefill": r"in its step [1-9]\d*",
    "decode": r"in its step [1-9]\d*",
}
HAPPENED = {
    signal.SIGKILL: "died: it was ended by SIGKILL",
    signal.SIGSTOP: r"was stopped by a signal and did not go on for \d s",
}
DEFAULT = {(signal.SIGKILL, 1, "decode")}
"""Rank 0 is the scheduler of one rank too, which tests/server/test_lifecycle.py kills."""
CELLS = [
    pytest.param(
        number, rank, state, id=f"{number.name}-{rank}-{state}", marks=[] if (number, rank, state) in DEFAULT else pytest.mark.slow
    )
    for number in HAPPENED
    for rank in (0, 1)
    for state in DOING
]


@contextlib.contextmanager
def two_ranks(model, fault="", rank=1):
    options = {"tp": 2, "config": {"num_pages": 600, "max_seq_len": 2048}}
    with server_process(model, scheduler=PROCESS, options=options, FAULT=fault, FAULTY_RANK=str(rank), ENGINE="real") as server:
        yield server


class Crowd:
    """Requests that end long after the test, half of them streamed; each from a thread of its own."""

    def __init__(self, url, threads):
        self._url, self._threads = url, threads
        self._futures = []

    def send(self, prompt="The sea is"):
        ask = self._plain if len(self._futures) % 2 else self._stream
        body = {"prompt": prompt, "max_tokens": 1800, "temperature": 0, "ignore_eos": True}
        self._futures.append(self._threads.submit(ask, f"{self._url}/v1/completions", body))

    @staticmethod
    def _plain(url, body):
        response = httpx.post(url, json=body, timeout=START_S)
        assert response.status_code == 503
        return response.json()

    @staticmethod
    def _stream(url, body):
        """Its last event, or its whole answer if it was refused."""
        last = ""
        with (
            contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError),
            httpx.stream("POST", url, json={**body, "stream": True}, timeout=START_S) as response,
        ):
            for line in response.iter_lines():
                last = line or last
        return json.loads(last.removeprefix("data: "))

    def are_accepted(self):
        """All that have been sent compute."""
        return httpx.get(f"{self._url}/health/progress", timeout=END_S).json()["num_requests"] == len(self._futures)

    def have_ended_with_an_error(self):
        for future in self._futures:
            answer = future.result(END_S)
            assert set(answer) == {"error"}
            assert answer["error"]["type"] == "server_error"
        return True


def has_all_children(server):
    server.children.clear()
    with contextlib.suppress(OSError, IndexError):  # one that is just being started
        server.find_children()
    return set(server.children) == {"api", "tokenizer", *NAMES}


def wait_for_signal(server):
    deadline = time.monotonic() + START_S
    while SIGNALLED not in server.lines.get(timeout=max(0.0, deadline - time.monotonic())):
        pass


def send_until_signal(server, crowd, state):
    """The last request brings about the step in which the signal comes."""
    for _ in range(FULL - 1):
        crowd.send()
    assert wait_until(crowd.are_accepted)
    crowd.send("word " * 3 * LONG if state == "prefill" else "One, two,")
    wait_for_signal(server)


@pytest.mark.parametrize(("number", "rank", "state"), CELLS)
def test_a_rank_that_is_lost_ends_every_request_and_is_named(number, rank, state, tiny_models):
    fault = "" if state == "idle" else f"{number.name}:{state}"
    with two_ranks(tiny_models("llama"), fault, rank) as server, ThreadPoolExecutor(FULL) as threads:
        if state == "start":
            assert wait_until(lambda: has_all_children(server), START_S)
            wait_for_signal(server)
        else:
            server.wait_until_ready()
        crowd = Crowd(server.url, threads)
        if state in ("prefill", "decode"):
            send_until_signal(server, crowd, state)
        begin = time.monotonic()
        if state == "idle":
            os.kill(server.children[NAMES[rank]], number)
        if (number, state) == (signal.SIGSTOP, "idle"):  # what comes now is accepted, and waits
            crowd.send()
            crowd.send()
            assert wait_until(crowd.are_accepted)
        assert server.wait_for_exit(END_S + 5) == 1
        assert server.leaves_nothing_behind()
        assert time.monotonic() - begin < END_S
        assert crowd.have_ended_with_an_error()
        assert re.search(rf"the {NAMES[rank]} process \(pid \d+\) {HAPPENED[number]}, {DOING[state]}", server.stderr), server.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_for_three_seconds_changes_no_text(rank, tiny_models):
    with two_ranks(tiny_models("llama")) as server, ThreadPoolExecutor(1) as thread:
        server.wait_until_ready()
        body = {"prompt": "The sea is", "max_tokens": 300, "temperature": 0, "ignore_eos": True}

        def ask():
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S).json()["choices"][0]["text"]

        undisturbed = ask()
        beside = thread.submit(ask)
        assert wait_until(lambda: httpx.get(f"{server.url}/health/progress").json()["num_requests"] == 1)
        pid = server.children[NAMES[rank]]
        os.kill(pid, signal.SIGSTOP)
        assert not wait_until(beside.done, 3)
        os.kill(pid, signal.SIGCONT)
        assert beside.result() == undisturbed
