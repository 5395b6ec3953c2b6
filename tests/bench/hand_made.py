"""Hand-made servers for the load client, threads of the test: how one answers is a function of the request. Knows no test."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from minisgl.bench.serve import Setup, run
from minisgl.bench.serve_http import parse_url
from minisgl.bench.serve_plan import Options

SMALL = {"prompt_tokens": (8, 16), "answer_tokens": (12, 20), "ramp_up": 0.0}
PROBE_TOKENS = 8
"""Fewer than the load asks for: so the servers know whether it has begun."""
CHAT = "/v1/chat/completions"


@dataclass
class Call:
    """One request that a server has got; what it sends and whether the connection stays open are its answer."""

    path: str
    headers: dict[str, str]
    body: dict
    connection: socket.socket
    is_open: bool = True

    @property
    def is_load(self) -> bool:
        return self.path == CHAT and max(self.body.get("max_tokens", 0), self.body.get("max_completion_tokens", 0)) > PROBE_TOKENS

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def reply(self, status: str, body: object, *headers: str) -> None:
        data = json.dumps(body).encode()
        self.send("\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *headers, "", ""]).encode() + data)

    def begin(self, num_events: int) -> None:
        self.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(num_events):
            self.event({"choices": [{"delta": {"content": "x"}, "finish_reason": None}]})

    def event(self, value: object) -> None:
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self, usage: dict | None = None) -> None:
        self.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        if usage is not None:
            self.event({"choices": [], "usage": usage})
        self.event("[DONE]")
        self.send(b"0\r\n\r\n")

    def close(self) -> None:
        self.is_open = False


def behave(call: Call) -> None:
    """As a server should: as many tokens as words in the prompt and a template of five, as many events as asked for."""
    if call.path == "/v1/models":
        call.reply("200 OK", {"data": [{"id": "first"}, {"id": "second"}]})
    elif call.path == CHAT:
        num_words = sum(len(message["content"].split()) for message in call.body["messages"])
        num_tokens = call.body.get("max_tokens") or call.body["max_completion_tokens"]
        call.begin(num_tokens)
        with_usage = "stream_options" in call.body
        call.end({"prompt_tokens": num_words + 5, "completion_tokens": num_tokens} if with_usage else None)
    else:
        call.reply("404 Not Found", {"error": {"message": "no such route"}})


def instead(misbehave: Callable[[Call], None]) -> Callable[[Call], None]:
    """Well until the load begins, then otherwise."""
    return lambda call: misbehave(call) if call.is_load else behave(call)


@dataclass
class HandMade:
    """A running server."""

    url: str
    calls: list[Call] = field(default_factory=list)
    num_connections: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def load(self) -> list[Call]:
        return [call for call in self.calls if call.is_load]


@contextlib.contextmanager
def hand_made(answer: Callable[[Call], None], tls: ssl.SSLContext | None = None) -> Iterator[HandMade]:
    class Handler(socketserver.StreamRequestHandler):
        def setup(self) -> None:
            if tls is not None:
                self.request = tls.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
            super().setup()

        def finish(self) -> None:
            super().finish()
            self.request.close()

        def handle(self) -> None:
            server.num_connections += 1
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while request := self.rfile.readline():
                    fields = iter(lambda: self.rfile.readline().decode().strip(), "")
                    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
                    body = self.rfile.read(int(headers.get("content-length", 0)))
                    call = Call(request.split()[1].decode(), headers, json.loads(body or b"{}"), self.connection)
                    server.calls.append(call)
                    answer(call)
                    if not call.is_open:
                        return

    class Threads(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

    with Threads(("127.0.0.1", 0), Handler) as listener:
        server = HandMade(f"http{'s' if tls else ''}://127.0.0.1:{listener.server_address[1]}")
        thread = threading.Thread(target=partial(listener.serve_forever, 0.02))
        thread.start()
        try:
            yield server
        finally:
            server.stop.set()
            listener.shutdown()
            thread.join()


def measure(server: HandMade, *, repeats: int = 1, timeout: float = 60.0, processes: int = 1, key: str | None = None, **options) -> dict:
    """Four requests in two streams, unless `options` say otherwise."""
    options = {"streams": 2, "requests_per_stream": 2, **SMALL, **options}
    setup = Setup(parse_url(server.url, key), timeout=timeout, num_processes=processes, repeats=repeats)
    return run(setup, Options(**options), say=lambda line: None)
