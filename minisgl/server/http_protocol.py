"""One HTTP connection: uvicorn's h11 protocol, with a short way for events, and two things that clients do taken care of.

An event of a stream is one token for one of hundreds of clients, so what happens once per event decides the server's throughput: it
goes straight to the socket, without a task's wake-up and without h11. Bytes that arrive while a complete request is being answered are
not parsed: uvicorn stops reading when a second request arrives early, and would not see that the client has left. And what is no HTTP is
refused in the one shape of errors.

Knows no route. Called by the API process, for uvicorn.
"""

from __future__ import annotations

from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from minisgl.errors import RequestError
from minisgl.server.http_errors import error_body

__all__ = ["HttpProtocol"]


class HttpProtocol(H11Protocol):
    """For uvicorn's `http` setting. A request finds it in its scope, as state["connection"]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}

    def write_chunk(self, data: bytes) -> bool:
        """Send `data`, not empty, as the next part of a chunked answer whose head has been sent; False, with nothing done, while the
        client does not keep up or if it is gone."""
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or not cycle.response_started or cycle.response_complete:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def data_received(self, data: bytes) -> None:
        """Early bytes of a next request are dropped, and the connection is closed after the answer, so that the client repeats it. An
        empty line is nothing: some clients send one after a body."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            super().data_received(data)
        elif data.strip(b"\r\n"):
            cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """For what h11 cannot parse; the connection ends with it."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()  # in the middle of an answer there is no room for another
            return
        body = msgspec.json.encode(error_body(RequestError(msg, status=400, code="bad_request")))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
