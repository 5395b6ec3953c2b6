"""Hundreds of clients that leave in the middle, garbage, ranks: pages, maps, descriptors and memory are afterwards where they were.

The scheduler and its ledger are the real ones, the engine checks every page it is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket

import httpx
import pytest

from minisgl.utils import ZmqPushQueue, ipc_address, run_directory
from tests.server.server_process import END_S, memory_bytes, server_process, wait_until, write_byte_model

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")

GROWTH_BYTES = 8 * 2**20
"""What the allocators may keep once a run is half over; 5,000 requests that leave two kilobytes each are more."""
KINDS = ("before the first token", "after it", "not streamed")


def send(server, number):
    """A request of a client that will leave; prompts share their beginnings."""
    kind = KINDS[number % 3]
    content = "The same beginning. " * 3 + f"Client {number}."
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 150, "stream": kind != "not streamed"}
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=END_S)
    data = json.dumps({**body, "seed": number}).encode()
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return kind, client


def leave_in_the_middle(server, num_clients):
    with contextlib.ExitStack() as stack:
        clients = [send(server, number) for number in range(num_clients)]
        for _, client in clients:
            stack.callback(client.close)
        for kind, client in clients:
            if kind == "after it":
                assert client.recv(100).startswith(b"HTTP/1.1 200")


def all_pages_become_free(server):
    """Requests end, the cache can be emptied, and then the scheduler, which tells when it has nothing to do, holds no page."""
    assert wait_until(lambda: httpx.get(f"{server.url}/health/progress").json()["num_requests"] == 0)
    assert wait_until(lambda: httpx.post(f"{server.url}/flush_cache").status_code == 200), "requests run on without their clients"
    is_free = False
    while not is_free:
        line = server.lines.get(timeout=END_S)
        match = re.search(r"idle: (\d+) free, \d+ cached, (\d+) in all", line)
        is_free = match is not None and match[1] == match[2]
    return True


def num_descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def settled_descriptors(server):
    """How many each process has open, once the last connections have been closed: unchanged over 20 readings."""
    readings = []

    def has_settled():
        readings.append({name: num_descriptors(pid) for name, pid in server.children.items()})
        return len(readings) >= 20 and all(reading == readings[-1] for reading in readings[-20:])

    assert wait_until(has_settled), readings[-20:]
    return readings[-1]


def check(server, num_clients, num_rounds):
    for _ in range(1 + num_rounds // 2):  # buffers and pools reach their size
        leave_in_the_middle(server, num_clients)
        assert all_pages_become_free(server)
    memory = {name: memory_bytes(pid) for name, pid in server.children.items()}
    descriptors = settled_descriptors(server)
    for _ in range(num_rounds - num_rounds // 2):
        leave_in_the_middle(server, num_clients)
        assert all_pages_become_free(server)
    assert wait_until(lambda: {name: num_descriptors(pid) for name, pid in server.children.items()} == descriptors)
    grown = {name: memory_bytes(pid) - memory[name] for name, pid in server.children.items()}
    assert max(grown.values()) < GROWTH_BYTES, grown
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Still there?", "max_tokens": 5, "seed": 0}, timeout=END_S)
    assert answer.json()["usage"]["completion_tokens"] >= 1


@contextlib.contextmanager
def started_server(directory, ranks, suffix=""):
    model = write_byte_model(directory / "model")
    with server_process(model, scheduler="tests.server.fake_engine_process", options={"tp": ranks}, suffix=suffix) as server:
        server.wait_until_ready()
        yield server
    assert "Traceback" not in server.stderr
    assert "ledger is wrong" not in server.stderr


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with started_server(tmp_path_factory.mktemp("server"), 1) as server:
        yield server


def test_a_hundred_clients_that_leave_leave_nothing_behind(running):
    check(running, 100, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_thousand_clients_that_leave_leave_nothing_behind(tmp_path, ranks):
    with started_server(tmp_path, ranks) as server:
        check(server, 500, 20)


@pytest.mark.slow  # two ranks that answer: test_ranks_http; that are lost: test_rank_faults
def test_two_ranks_answer_like_one_and_leave_nothing_behind(running, tmp_path):
    suffix = f"test-{secrets.token_hex(4)}"
    (run_directory() / f"{suffix}.rendezvous").write_bytes(b"what ranks that died have left" * 10)
    with started_server(tmp_path, 2, suffix) as server:
        assert set(server.children) == {"api", "tokenizer", "scheduler", "scheduler rank 1"}
        texts = [[complete(each, number) for number in range(4)] for each in (running, server)]
        assert texts[0] == texts[1]
        leave_in_the_middle(server, 30)
        assert all_pages_become_free(server)
        os.kill(server.children["scheduler rank 1"], signal.SIGKILL)
        assert server.wait_for_exit() == 1
        assert server.leaves_nothing_behind()
        assert "the scheduler rank 1 process" in server.stderr
        assert "died: it was ended by SIGKILL" in server.stderr


def complete(server, number):
    body = {"prompt": "Two ranks." * (number + 1), "max_tokens": 20, "seed": number}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=END_S).json()["choices"][0]["text"]


@pytest.mark.parametrize(
    "frame", [b"", b"\0", b"\x80\x04cos\nsystem\n", b"\xff" * 1000, b"\x81\xa4type\xa7UserMsg", bytes(range(256)) * 16]
)
def test_garbage_on_every_inner_socket_is_dropped(running, frame):
    for name in ("frontend", "detokenizer", "backend"):
        with ZmqPushQueue(ipc_address(running.suffix, name), create=False, encoder=bytes) as queue:
            queue.put_raw(frame)
    assert wait_until(lambda: "".join(running.errors).count(f"dropped a frame of {len(frame)} bytes") == 3)
    assert complete(running, 0) == complete(running, 0)
