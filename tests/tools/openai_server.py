"""A small OpenAI-compatible server whose every answer a test writes; it keeps the requests. Imports nothing of minisgl."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 60.0


class Exchange:
    """One request and the writing of its answer."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        self.body = body
        self._handler = handler

    @property
    def headers(self) -> Any:
        return self._handler.headers

    def status(self, status: int, body: bytes, **headers: str) -> None:
        """A whole answer."""
        self._handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self._handler.send_header(name, value)
        self._handler.end_headers()
        self._handler.wfile.write(body)

    def begin(self) -> None:
        """The head of a stream."""
        self._handler.send_response(200)
        self._handler.send_header("Content-Type", "text/event-stream")
        self._handler.end_headers()

    def event(self, data: str) -> None:
        self._handler.wfile.write(f"data: {data}\n\n".encode())
        self._handler.wfile.flush()

    def text(self, text: str | None, reason: str | None = None) -> None:
        """A piece of an answer."""
        self.event(json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}))

    def answer(self, *pieces: str, reason: str = "stop") -> None:
        """A whole stream."""
        self.begin()
        for piece in pieces:
            self.text(piece)
        self.text(None, reason)
        self.event("[DONE]")

    def is_left(self) -> bool:
        """Whether the client closes the connection, waited for."""
        self._handler.connection.settimeout(WAIT_S)
        try:
            return self._handler.connection.recv(1) == b""
        except ConnectionResetError:
            return True


class FakeServer:
    """`answers` are what happens to the next chat completions, in order. Where there is none, the answer is the question."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Callable[[Exchange], None]] = queue.Queue()
        self.requests: list[Exchange] = []
        self.models: Callable[[Exchange], None] = lambda exchange: exchange.status(200, b'{"data": [{"id": "fake-model"}]}')
        self.url = ""

    @property
    def bodies(self) -> list[Any]:
        return [request.body for request in self.requests]

    def handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                server.models(Exchange(self, None))

            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                exchange = Exchange(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                server.requests.append(exchange)
                try:
                    act = server.answers.get_nowait()
                except queue.Empty:
                    exchange.answer("you said ", exchange.body["messages"][-1]["content"], ".")
                else:
                    act(exchange)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Runs on a free port until the end."""
    fake = FakeServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), fake.handler()) as http:
        fake.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield fake
        finally:
            http.shutdown()
            thread.join()
