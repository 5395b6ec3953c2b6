"""What a server allows: each limit from just below and just above, the key, other origins, request ids; and that nobody else notices."""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minisgl.cli import main
from minisgl.errors import ConfigError, WorkerError
from minisgl.processes.logs import REQUEST_ID, SafeFormatter
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server import openapi
from minisgl.server.http_options import HttpOptions
from minisgl.server.launcher import CHILD_MODULES, serve
from minisgl.server.options import ServerOptions
from tests.server.local_server import WAIT, chat_body, local_server
from tests.server.server_process import wait_until, write_byte_model

BODY_BYTES, HEADER_BYTES, PLACES, TIMEOUT = 1000, 2000, 3, 0.4
KEY = "top-secret"
ORIGIN = "https://page.example"
ROUTES = [(method, path.replace("{model}", "x")) for method, path, *_ in openapi.ROUTES]


@pytest.fixture(scope="module")
def small():
    """Limits of size are small, those of time are the defaults."""
    with local_server(options=HttpOptions(max_body_bytes=BODY_BYTES, max_header_bytes=HEADER_BYTES, max_waiting_requests=PLACES)) as server:
        yield server


@pytest.fixture(scope="module")
def hasty():
    """Limits of time are small."""
    options = HttpOptions(header_timeout=TIMEOUT, request_timeout=TIMEOUT, keep_alive_timeout=1)
    with local_server(options=options) as server:
        yield server


@pytest.fixture(scope="module")
def locked():
    """With a key and an origin."""
    with local_server(options=HttpOptions(api_key=KEY, cors_origin=f"https://other.example, {ORIGIN}")) as server:
        yield server


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def connect(server, receive_bytes=None):
    """A plain socket, which may be made to hold little that has not been read."""
    client = socket.socket()
    client.settimeout(WAIT)
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect((server.client.base_url.host, server.client.base_url.port))
    return client


def read_all(client):
    """Until the server closes, in whatever way."""
    blocks = []
    try:
        while block := client.recv(65536):
            blocks.append(block)
    except ConnectionResetError:
        pass
    return b"".join(blocks)


def post(path, body, headers=""):
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


# Sizes


def test_a_body_may_have_its_limit_and_no_byte_more(small):
    body = b'{"tokens":[97]}'
    fits = small.client.post("/detokenize", content=body.ljust(BODY_BYTES))
    assert (fits.status_code, fits.json()) == (200, {"text": "a"})
    long = small.client.post("/detokenize", content=body.ljust(BODY_BYTES + 1))
    assert (long.status_code, error_of(long)["code"]) == (413, "request_too_large")
    chunked = small.client.post("/detokenize", content=iter([body, b" " * BODY_BYTES]))
    assert (chunked.status_code, error_of(chunked)["code"]) == (413, "request_too_large")


def test_headers_may_have_their_limit_and_not_more(small):
    assert small.client.get("/version", headers={"X-Pad": "a" * (HEADER_BYTES - 300)}).status_code == 200
    long = small.client.get("/version", headers={"X-Pad": "a" * HEADER_BYTES})
    assert (long.status_code, error_of(long)["code"]) == (431, "headers_too_large")


def test_headers_without_an_end_are_refused_at_their_limit(small):
    with connect(small) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Pad: " + b"a" * HEADER_BYTES)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_a_full_queue_is_a_429_until_a_first_token_or_a_leaving_makes_room(small):
    with small.stream_chat() as response:
        streamed = small.scheduler.hear_request().uid
        second = small.start_chat()
        uid = small.scheduler.hear_request().uid
        with connect(small) as leaving:
            leaving.sendall(post("/v1/chat/completions", chat_body()))
            third = small.scheduler.hear_request().uid
            full = small.chat()
        assert (full.status_code, error_of(full)["code"], full.headers["Retry-After"]) == (429, "queue_full", "1")
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert small.scheduler.hear_abort() == third
        assert small.chat(n=2).status_code == 429, "one place is free"
        small.scheduler.say(streamed, "A")
        events = small.events(response)
        assert any(event["choices"][0]["delta"].get("content") == "A" for event in events), "now two are"
        pair = small.start_chat(n=2)
        for place in (streamed, uid, *(small.scheduler.hear_request().uid for _ in range(2))):
            small.scheduler.end(place)
        assert list(events)
    assert [second.result(WAIT).status_code, pair.result(WAIT).status_code] == [200] * 2


def test_a_refused_prompt_leaves_the_queue(small):
    assert [small.chat(content="raise").status_code for _ in range(PLACES + 1)] == [400] * (PLACES + 1)
    assert small.hears_no_abort()


def test_a_request_that_the_queue_could_never_hold_is_a_400(small):
    response = small.chat(n=PLACES + 1)
    assert (response.status_code, error_of(response)["code"]) == (400, "too_many_outputs")
    whole = small.start_chat(n=PLACES)
    for _ in range(PLACES):
        small.scheduler.end(small.scheduler.hear_request().uid)
    assert whole.result(WAIT).status_code == 200


# Times


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /version HTTP/1.1\r\nHost:",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /version",
        b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nPOST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /no/such/route HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_arrive_in_time_ends_its_connection_whatever_drips_in(hasty, sent):
    with connect(hasty) as client:
        client.sendall(sent)
        start = time.monotonic()
        client.settimeout(0.05)
        while time.monotonic() < start + WAIT:
            try:
                if not client.recv(65536):
                    break
            except TimeoutError:
                client.send(b"a" if sent else b"")
            except OSError:
                break
        assert time.monotonic() - start < WAIT


def test_a_connection_that_waits_for_its_answer_is_not_slow(small):
    with local_server(options=HttpOptions(header_timeout=TIMEOUT)) as server, connect(server) as idle:
        answer = server.start_chat()
        uid = server.scheduler.hear_request().uid
        assert read_all(idle) == b""
        server.scheduler.end(uid)
        assert answer.result(WAIT).status_code == 200


def test_a_connection_that_is_idle_between_two_requests_is_closed_after_the_keep_alive_time(hasty):
    with connect(hasty) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        start = time.monotonic()
        assert read_all(client) == b""
        assert 2 * TIMEOUT < time.monotonic() - start < WAIT, "not the header time-out"


def test_a_request_that_takes_too_long_is_a_504_and_is_aborted(hasty):
    answer = hasty.start_chat()
    uid = hasty.scheduler.hear_request().uid
    hasty.scheduler.say(uid, "A")
    assert hasty.scheduler.hear_abort() == uid
    response = answer.result(WAIT)
    assert (response.status_code, error_of(response)["code"]) == (504, "request_timeout")
    assert hasty.hears_no_abort()


def test_a_stream_that_takes_too_long_ends_with_an_error_event(hasty):
    with hasty.stream_chat() as response:
        uid = hasty.scheduler.hear_request().uid
        hasty.scheduler.say(uid, "A")
        lines = [line for line in response.iter_lines() if line]
    assert hasty.scheduler.hear_abort() == uid
    assert '"content":"A"' in "".join(lines)
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "request_timeout"


# Slow readers


def flood_until_aborted(server, uid, neighbour):
    """Large events for `uid` until its abort comes, with a token for a neighbour after each."""
    deadline, num_tokens = time.monotonic() + 3 * WAIT, 0
    while not server.scheduler.aborts[uid]:
        assert time.monotonic() < deadline, "a client that reads nothing is not dropped"
        server.scheduler.say_scored(uid, "x" * 20, 20)
        server.scheduler.say(neighbour, "n")
        num_tokens += 1
        with contextlib.suppress(TimeoutError):
            server.scheduler.let_arrive(0.02)
    return num_tokens


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (HttpOptions(slow_reader_bytes=2**30, slow_reader_timeout=0.5), "has read nothing for 0.5 seconds"),
        (HttpOptions(slow_reader_bytes=20_000), "20000 are allowed"),
    ],
)
def test_a_client_that_reads_nothing_is_dropped_and_its_neighbour_gets_everything(options, why, caplog):
    body = chat_body(stream=True, logprobs=True, top_logprobs=20)
    with local_server(options=options) as server, connect(server, 4096) as client, ThreadPoolExecutor(1) as thread:
        client.sendall(post("/v1/chat/completions", body, "X-Request-Id: lazy\r\n"))
        uid = server.scheduler.hear_request().uid
        with server.stream_chat() as response:
            neighbour = server.scheduler.hear_request().uid
            events = thread.submit(lambda: list(server.events(response)))
            num_tokens = flood_until_aborted(server, uid, neighbour)
            assert server.scheduler.aborts == {uid: 1}
            assert not events.done()
            server.scheduler.end(neighbour)
            texts = [event["choices"][0]["delta"].get("content") or "" for event in events.result(WAIT)]
        assert "".join(texts) == "n" * num_tokens
        assert wait_until(lambda: server.frontend.num_open == 0)
        assert b"[DONE]" not in read_all(client)
        assert any("lazy" in message and why in message for message in caplog.messages)


def num_held(server):
    """Connections for which the server holds a descriptor."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    port, listening, orphaned = f":{server.client.base_url.port:04X}", "0A", "0"
    return sum(line[1].endswith(port) and line[3] != listening and line[9] != orphaned for line in lines)


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="reads /proc")
def test_a_client_that_leaves_the_end_of_an_answer_unread_costs_no_connection_for_long():
    with local_server(options=HttpOptions(slow_reader_timeout=TIMEOUT)) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server, 4096)) for _ in range(10)]
        for number, client in enumerate(clients):  # among these sizes are some of which little is left when the system has its fill
            client.sendall(post("/detokenize", {"tokens": [97] * 30_000 * (number + 1)}, "Connection: close\r\n"))
        assert num_held(server) > 0
        assert wait_until(lambda: num_held(server) == 0)


def test_a_client_that_reads_slowly_gets_everything():
    body = chat_body(stream=True, logprobs=True, top_logprobs=20)
    timeout = 3 * TIMEOUT  # a thread of a busy machine may stand still for longer than TIMEOUT
    options = HttpOptions(slow_reader_timeout=timeout, slow_reader_bytes=2**30)
    with local_server(options=options) as server, connect(server, 65536) as client:
        client.sendall(post("/v1/chat/completions", body))
        uid = server.scheduler.hear_request().uid
        server.scheduler.say_scored(uid, "x" * 1000, 20)
        server.scheduler.end(uid)
        start, blocks = time.monotonic(), []
        while block := client.recv(200_000, socket.MSG_WAITALL):
            blocks.append(block)
            threading.Event().wait(timeout / 5)
        assert time.monotonic() - start > 1.5 * timeout
        assert b"[DONE]" in blocks[-1]


# The key


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("get", "/openapi.json"), ("get", "/no/such/route"), ("get", "/healthy")])
def test_without_the_key_nothing_is_answered_but_health(locked, method, path):
    is_free = path == "/health" or path.startswith("/health/")
    for wrong in ({}, {"Authorization": "Bearer top-secre"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY}, {"X": KEY}):
        response = locked.client.request(method, path, headers=wrong)
        assert (response.status_code == 401) is not is_free
        if not is_free:
            assert error_of(response)["type"] == "authentication_error"
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert KEY not in response.text
    right = locked.client.put(path, headers={"Authorization": f"Bearer {KEY}"})
    assert right.status_code in (404, 405)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_key_everything_is_as_without_one(locked, scheme):
    assert locked.client.get("/version", headers={"Authorization": f"{scheme} {KEY}"}).status_code == 200


def test_the_key_is_shown_nowhere(tmp_path):
    http = HttpOptions(api_key=KEY)
    assert KEY not in repr(http)
    config = SchedulerConfig(model_path=str(write_byte_model(tmp_path / "model")), backend_create_detokenizer_link=False)
    lines = []
    with pytest.raises(WorkerError):
        serve(
            ServerOptions(config, port=0, http=http), say=lines.append, child_modules=dict.fromkeys(CHILD_MODULES, "tests.no_such_module")
        )
    assert "  max_body_bytes = 16777216" in lines
    assert KEY not in "\n".join(lines)


@pytest.mark.parametrize("key", ["", "a b", "schlüssel", "a\n"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(key):
    with pytest.raises(ConfigError, match="--api-key") as caught:
        HttpOptions(api_key=key)
    assert key not in str(caught.value) or not key


# Other origins, and what stands before the routes


def test_without_origins_no_answer_speaks_of_them(small):
    response = small.client.get("/version", headers={"Origin": ORIGIN})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_page_of_a_named_origin_may_ask_and_others_may_not(locked):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = locked.client.options("/v1/chat/completions", headers={"Origin": ORIGIN, **ask})
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
    assert locked.client.options("/v1/chat/completions", headers={"Origin": "https://evil.example", **ask}).status_code == 400
    refused = locked.client.get("/version", headers={"Origin": ORIGIN})
    assert (refused.status_code, refused.headers["Access-Control-Allow-Origin"]) == (401, ORIGIN), "a page may read why"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_is_noticed_behind_key_and_origins(locked, is_streamed):
    with connect(locked) as client:
        headers = f"Authorization: Bearer {KEY}\r\nOrigin: {ORIGIN}\r\n"
        client.sendall(post("/v1/chat/completions", chat_body(stream=is_streamed), headers))
        uid = locked.scheduler.hear_request().uid
    assert locked.scheduler.hear_abort() == uid


@pytest.mark.parametrize(
    ("sent", "shown"), [(b"abc-1", "abc-1"), (b"x" * 129, "x" * 128), (b"caf\xe9\t1", "caf\\xe9\\t1"), (b"a{b}\\n", "a{b}\\n")]
)
def test_a_request_id_comes_back_cut_and_escaped(small, sent, shown):
    assert small.client.get("/version", headers={b"X-Request-Id": sent}).headers["X-Request-Id"] == shown
    assert small.client.get("/no/such/route", headers={b"X-Request-Id": sent}).headers["X-Request-Id"] == shown


def test_a_request_without_an_id_gets_one_of_its_own(small):
    ids = {small.client.get("/version").headers["X-Request-Id"] for _ in range(3)}
    assert len(ids) == 3


def test_a_line_of_the_log_names_the_request_it_belongs_to():
    record = logging.LogRecord("x", logging.ERROR, "", 0, "broken", None, None)
    formatter = SafeFormatter("%(message)s")

    def within() -> str:
        REQUEST_ID.set("id\n1")
        return formatter.format(record)

    assert contextvars.copy_context().run(within) == "broken [request id\\n1]"
    assert formatter.format(record) == "broken"


# The command line


def test_flags_and_environment_reach_the_server(monkeypatch):
    started = []
    monkeypatch.setattr("minisgl.server.launcher.serve", lambda options, say: started.append(options.http) or 0)
    monkeypatch.setenv("MINISGL_API_KEY", "from-outside")
    assert main(["serve"]) == 0
    flags = ["--max-body-bytes", "7", "--max-waiting-requests", "8", "--request-timeout", "9.5", "--cors-origin", "*", "--api-key", KEY]
    assert main(["serve", *flags]) == 0
    wanted = HttpOptions(max_body_bytes=7, max_waiting_requests=8, request_timeout=9.5, cors_origin="*", api_key=KEY)
    assert started == [HttpOptions(api_key="from-outside"), wanted]


@pytest.mark.parametrize("name", ["max_body_bytes", "max_header_bytes", "max_waiting_requests", "slow_reader_bytes", "keep_alive_timeout"])
def test_a_limit_of_nothing_is_refused_with_its_flag(name):
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        HttpOptions(**{name: 0})


@pytest.mark.parametrize("name", ["slow_reader_timeout", "header_timeout", "request_timeout"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 86_401])
def test_a_time_that_cannot_be_waited_for_is_refused_with_its_flag(name, seconds):
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        HttpOptions(**{name: seconds})
