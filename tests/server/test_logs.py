"""What clients write forges no log line: neither through requests that are refused nor through an exception that quotes them."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys

import httpx
import pytest

from minisgl.processes.logs import SafeFormatter
from tests.server.server_process import END_S, server_process, wait_until, write_byte_model

FORGED = "x\nERROR fake\r\n2026-01-01 00:00:00,000 ERROR fake: gone\u2028ERROR fake\x1b[31m\x9b31m\0\x7f"


def record(message="%s", *values, exc_info=None):
    return logging.LogRecord("minisgl.test", logging.ERROR, "file.py", 1, message, values, exc_info)


def formatted(*values, exc_info=None):
    return SafeFormatter("%(levelname)s %(name)s: %(message)s").format(record("model %s", *values, exc_info=exc_info))


def test_control_characters_in_a_message_are_shown_as_escapes():
    line = formatted(FORGED)
    assert line.isprintable()
    assert line.startswith("ERROR minisgl.test: model x\\nERROR fake\\r\\n2026")
    assert formatted("名 é 🤗") == "ERROR minisgl.test: model 名 é 🤗"


def test_a_long_message_is_cut():
    assert len(formatted("a" * 1_000_000)) < 3_000


@pytest.mark.parametrize("text", [FORGED, "\nERROR fake" * 100_000])
def test_each_line_of_a_traceback_is_set_off(text):
    try:
        raise KeyError(text) from ValueError(text)
    except KeyError:
        lines = formatted("m", exc_info=sys.exc_info()).split("\n")
    assert lines[0] == "ERROR minisgl.test: model m"
    assert all(line.startswith("  | ") and line.isprintable() for line in lines[1:])
    assert lines[1].startswith("  | ValueError: ")
    assert sum(map(len, lines)) < 30_000


BAD_REQUEST_LINES = [b"GET /\x1b[31m HTTP/1.1\r\n\r\n", b"ERROR fake\r\nERROR fake\r\n\r\n", b"\0" * 100 + b"\r\n\r\n"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
def test_hostile_requests_leave_the_servers_log_clean(tmp_path):
    with server_process(write_byte_model(tmp_path / "model")) as server:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=END_S) as client:
            for name in (FORGED, "a" * 1_000_000, "\n" * 1_000_000):
                body = {"model": name, "messages": [{"role": "user", "content": FORGED}], "user": FORGED}
                response = client.post("/v1/chat/completions", json=body)
                assert response.status_code == 404
                assert len(response.text) < 3_000
                body["model"], body[name[:50]] = None, 1
                assert client.post("/v1/chat/completions", json=body).status_code == 400
            assert client.get("/v1/models/x%0aERROR%20fake%1b[31m").status_code == 404
            assert client.get("/x%0aERROR%20fake%1b[31m", headers={"User-Agent": "ERROR fake"}).status_code == 404
            host, port = server.url.removeprefix("http://").split(":")
            for line in BAD_REQUEST_LINES:
                with socket.create_connection((host, int(port)), timeout=END_S) as connection:
                    connection.sendall(line)
                    assert connection.recv(100).startswith(b"HTTP/1.1 4")
        assert wait_until(lambda: sum("Invalid HTTP request" in line for line in server.errors) == len(BAD_REQUEST_LINES))
        assert all(re.match(r"\d{4}-\d\d-\d\d [\d:,]+ WARNING uvicorn\.error: ", line) for line in server.errors)
        assert all(line.isprintable() and "fake" not in line for line in server.errors)
