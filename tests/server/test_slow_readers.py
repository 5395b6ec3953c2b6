"""200 clients that read a byte a second: what waits for them is bounded, and their neighbours notice nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.server_process import END_S, START_S, memory_bytes, server_process, wait_until, write_byte_model

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")

NUM_READERS = 200
MOST_BYTES = NUM_READERS * 2**20
"""By which the API may grow: what --slow-reader-bytes allows to each."""


def send(url, **body):
    """A streamed request that has been sent; its socket, which holds little that has not been read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(START_S)
    host, port = url.removeprefix("http://").split(":")
    client.connect((host, int(port)))
    data = json.dumps({**body, "stream": True}).encode()
    client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


@pytest.mark.slow  # by default tests/server/test_limits.py has one such client
@pytest.mark.parametrize(
    ("max_tokens", "step_s", "num_answers"),
    [(100, 0.02, 3), pytest.param(8000, 0.02, 100, marks=pytest.mark.timeout(900))],
)
def test_200_clients_that_read_a_byte_a_second_cost_bounded_memory_and_their_neighbours_nothing(tmp_path, max_tokens, step_s, num_answers):
    with server_process(write_byte_model(tmp_path / "model"), FAKE_STEP_S=str(step_s)) as server, contextlib.ExitStack() as stack:
        server.wait_until_ready()
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=START_S))
        api = server.children["api"]
        before = memory_bytes(api)
        with ThreadPoolExecutor(16) as threads:
            readers = list(threads.map(lambda _: send(server.url, prompt="x", max_tokens=max_tokens), range(NUM_READERS)))
        for reader in readers:
            stack.enter_context(reader)
        heads = [reader.recv(1) for reader in readers]
        assert heads == [b"H"] * NUM_READERS

        num_answered, most_bytes, next_byte = 0, 0, time.monotonic() + 1
        end = time.monotonic() + max_tokens * step_s  # all tokens have been sampled by then
        while num_answered < num_answers or time.monotonic() < end:
            answer = client.post("/v1/completions", json={"prompt": "y", "max_tokens": 5}).json()
            assert answer["choices"][0]["text"] == "xxxxx"
            num_answered += 1
            most_bytes = max(most_bytes, memory_bytes(api) - before)
            if time.monotonic() >= next_byte:
                next_byte += 1
                for reader in readers:
                    with contextlib.suppress(ConnectionResetError):  # it may have been dropped
                        reader.recv(1)
        assert most_bytes < MOST_BYTES
        for reader in readers:
            reader.close()
        assert wait_until(lambda: client.get("/health/progress").json()["num_requests"] == 0, END_S)
        assert client.post("/v1/completions", json={"prompt": "y", "max_tokens": 5}).status_code == 200
