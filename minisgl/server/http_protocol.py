"""One HTTP connection: uvicorn's h11 protocol, with a short way for events, and what clients do, on purpose or not, taken care of.

An event of a stream is one token for one of hundreds of clients, so what happens once per event decides the server's throughput: it
goes straight to the socket, without a task's wake-up and without h11. Bytes that arrive while a complete request is being answered are
not parsed: uvicorn stops reading when a second request arrives early, and would not see that the client has left. And what is no HTTP is
refused in the one shape of errors. A request that does not arrive in time and a client that does not read what it asked for are cut off.

Knows no route. Called by the API process, for uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from minisgl.errors import RequestError
from minisgl.server.http_errors import error_body
from minisgl.server.http_options import HttpOptions

__all__ = ["HEAD_TOO_LONG", "HttpProtocol"]

logger = logging.getLogger(__name__)

HEAD_TOO_LONG = RequestError("the request's headers are longer than what is allowed", status=431, code="headers_too_large")
CATCH_UP_S = 1.0
"""A client may be behind by any amount for so long: a burst is not its fault."""
SEND_BUFFER_BYTES = 128 * 1024
"""What the system may hold for a client; left to itself it takes megabytes, and for long nothing tells that a client reads."""
REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class HttpProtocol(H11Protocol):
    """For uvicorn's `http` setting. A request finds it in its scope, as state["connection"]."""

    def __init__(self, *args: Any, options: HttpOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}
        self._options = options
        self._arrival: asyncio.TimerHandle | None = None
        """runs while a request is arriving"""
        self._stall: asyncio.TimerHandle | None = None
        """runs while the client has much to read"""
        self._behind_since = 0.0
        self._is_dropped = False
        self._chunks: list[bytes] = []
        """taken and not sent yet"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Its first request must come now."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._arrival = self.loop.call_later(self._options.header_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is to be watched any more."""
        self._stop_arrival()
        self._stop_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        self._behind_since = self.loop.time()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._stop_stall()
        self._watch_rest()

    def check_backlog(self, num_bytes: int) -> None:
        """Drop the client if it is behind and more than it may leave waiting, `num_bytes`, waits for it."""
        is_behind = self.flow.write_paused and self.loop.time() - self._behind_since >= CATCH_UP_S
        if is_behind and num_bytes > self._options.slow_reader_bytes:
            self._drop(f"{num_bytes} bytes wait for it, {self._options.slow_reader_bytes} are allowed (--slow-reader-bytes)")

    def write_chunk(self, data: bytes) -> bool:
        """Take `data`, not empty, as the next part of a chunked answer whose head has been sent; False, with nothing done, while the
        client does not keep up or if it is gone. `flush_chunks` must be called before anything else is sent."""
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or not cycle.response_started or cycle.response_complete:
            return False
        self._chunks.append(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def flush_chunks(self) -> None:
        """Send what `write_chunk` has taken, all of it by one call of the system, which is what an event costs most."""
        if self._chunks:
            self.transport.write(b"".join(self._chunks))
            self._chunks.clear()

    def data_received(self, data: bytes) -> None:
        """Early bytes of a next request are dropped, and the connection is closed after the answer, so that the client repeats it. An
        empty line is nothing: some clients send one after a body."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            super().data_received(data)
            self._watch_arrival()
        elif data.strip(b"\r\n"):
            cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """A next request may have begun to arrive together with the last one."""
        super().on_response_complete()
        self._watch_arrival()
        self._watch_rest()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing more has come."""
        super().timeout_keep_alive_handler()
        self._watch_rest()

    def send_400_response(self, msg: str) -> None:
        """For what h11 cannot parse; the connection ends with it."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()  # in the middle of an answer there is no room for another
            return
        is_head = cycle is None or cycle.response_complete
        is_long = is_head and len(self.conn.trailing_data[0]) > self._options.max_header_bytes
        error = HEAD_TOO_LONG if is_long else RequestError(msg, status=400, code="bad_request")
        body = msgspec.json.encode(error_body(error))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        start = h11.Response(status_code=error.status, headers=headers, reason=REASONS[error.status])
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_arrival(self) -> None:
        """Start or stop the timer, for what has come by now."""
        state = self.conn.their_state
        if state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0]):
            if self._arrival is None:
                self._arrival = self.loop.call_later(self._options.header_timeout, self.transport.abort)
        else:
            self._stop_arrival()

    def _stop_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _watch_rest(self) -> None:
        """A connection that is being closed stays open until its client has read the rest, which may be too little to be waited for."""
        if self.transport.is_closing() and self._stall is None and self.transport.get_write_buffer_size():
            self._watch_reader()

    def _watch_reader(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._options.slow_reader_timeout, self._check_reader, num_bytes)

    def _check_reader(self, num_before: int) -> None:
        """Drop the client if not one of the bytes that waited has gone."""
        if self.transport.get_write_buffer_size() < num_before:
            self._watch_reader()
        else:
            self._drop(f"it has read nothing for {self._options.slow_reader_timeout:g} seconds (--slow-reader-timeout)")

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _drop(self, why: str) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            logger.warning("a slow client has been dropped (request %s): %s", self.scope["state"].get("request_id"), why)
            self.transport.abort()
