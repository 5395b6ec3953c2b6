"""What stands in front of all routes, as plain ASGI: request ids, the length of headers, the key, other origins.

It hands `receive` on untouched, so that whoever waits for the client's leaving hears of it. Knows no route but /health, which needs no
key. Called by the app.
"""

from __future__ import annotations

import hmac
import secrets

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import RequestError
from minisgl.processes.logs import REQUEST_ID
from minisgl.server.http_errors import respond
from minisgl.server.http_options import HttpOptions
from minisgl.server.http_protocol import HEAD_TOO_LONG

__all__ = ["guarded"]

MAX_ID_CHARS = 128
"""Of an id that a client has chosen; more are cut off."""
METHODS = ("GET", "POST")
EXPOSED = ("X-Request-Id", "Retry-After")
WRONG_KEY = RequestError("a key is wanted: send the header `Authorization: Bearer KEY`", status=401, code="invalid_api_key")


def guarded(app: ASGIApp, options: HttpOptions) -> ASGIApp:
    """`app` behind the gate."""
    gate = _Gate(app, options)
    if not options.origins:
        return gate
    return CORSMiddleware(gate, options.origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=EXPOSED)


class _Gate:
    """An ASGI application."""

    def __init__(self, app: ASGIApp, options: HttpOptions) -> None:
        self._app = app
        self._max_header_bytes = options.max_header_bytes
        self._key = options.api_key.encode() if options.api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _shown(headers.get(b"x-request-id", b"")) or secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        error = self._refusal(scope, headers)
        await (self._app if error is None else respond(error))(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestError | None:
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(text) + 4 for name, text in scope["headers"])
        if num_bytes > self._max_header_bytes:
            return HEAD_TOO_LONG
        if self._key is None or scope["path"] == "/health" or scope["path"].startswith("/health/"):
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        is_right = hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"
        return None if is_right else WRONG_KEY


def _shown(text: bytes) -> str:
    """Fit for a header and for a line of a log."""
    chars = text[:MAX_ID_CHARS].decode("latin-1")
    return chars if chars.isascii() and chars.isprintable() else chars.encode("unicode_escape").decode()
