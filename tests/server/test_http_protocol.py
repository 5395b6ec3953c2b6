"""The connection under the routes: clients that leave after a stray byte, requests sent early, what is no HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.local_server import WAIT

BODY = json.dumps({"prompt": "abc", "max_tokens": 9}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
EARLY = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def connection(server) -> Iterator[socket.socket]:
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port), timeout=WAIT) as client:
        yield client


def read_all(client) -> bytes:
    """Until the server closes."""
    return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("late", [b"", b"\r\n", EARLY, b"\0" * 100_000])
def test_a_client_that_leaves_is_noticed_whatever_it_sent_after_its_body(server, late, is_streamed):
    body = json.dumps({"prompt": "abc", "max_tokens": 9, "stream": is_streamed}).encode()
    with connection(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        uid = server.scheduler.hear_request().uid
        client.sendall(late)
    assert server.scheduler.hear_abort() == uid


def test_an_empty_line_after_a_body_keeps_the_connection(server):
    with connection(server) as client:
        client.sendall(REQUEST)
        uid = server.scheduler.hear_request().uid
        client.sendall(b"\r\n")
        server.scheduler.say(uid, "A")
        server.scheduler.end(uid)
        answer = client.recv(65536)
        client.sendall(EARLY.replace(b"Host: x", b"Connection: close\r\nHost: x"))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"version"' in read_all(client)


def test_a_request_sent_early_is_not_answered_and_the_connection_closes_after_the_first(server):
    with connection(server) as client:
        client.sendall(REQUEST)
        uid = server.scheduler.hear_request().uid
        client.sendall(EARLY)
        server.scheduler.say(uid, "A")
        server.scheduler.end(uid)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"text":"A"' in answer


def test_requests_that_arrive_together_are_answered_one_after_the_other(server):
    with connection(server) as client:
        client.sendall(EARLY + EARLY.replace(b"Host: x", b"Connection: close\r\nHost: x"))
        assert read_all(client).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_one_shape(server, garbage):
    with connection(server) as client:
        client.sendall(garbage)
        answer = b""
        try:
            answer = read_all(client)
        except ConnectionResetError:  # closed with our bytes unread
            assert len(garbage) > 65536
            return
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert (set(error), error["type"], error["code"]) == (
        {"message", "type", "param", "code"},
        "invalid_request_error",
        "bad_request",
    )
