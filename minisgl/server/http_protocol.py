"""One HTTP connection: uvicorn's h11 protocol, but for two things that clients do.

Bytes that arrive while a complete request is being answered are not parsed: uvicorn stops reading when a second request arrives early,
and would not see that the client has left. And what is no HTTP is refused in the one shape of errors.

Knows no route. Called by the API process, for uvicorn.
"""

from __future__ import annotations

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from minisgl.errors import RequestError
from minisgl.server.http_errors import error_body

__all__ = ["HttpProtocol"]


class HttpProtocol(H11Protocol):
    """For uvicorn's `http` setting."""

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
