"""The one place that turns errors into what a client reads: `{"error": {message, type, param, code}}` and a status.

Knows no route. Called by the app for whatever a handler raises, and by streams that break off.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from minisgl.errors import RequestError
from minisgl.server.frontend import ClientGoneError

__all__ = ["EXCEPTION_HANDLERS", "ErrorBody", "error_body", "respond"]

MAX_MESSAGE_CHARS = 1000
"""A message may quote what the client sent; it need not quote all of it."""
CLIENT_CLOSED_REQUEST = 499
"""What nginx logs for a client that went away; nobody receives it."""
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
"""What clients expect beside such a status."""
TYPES = {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is no success, and of the event that ends a stream that broke off."""

    error: ErrorDetail


def error_body(error: RequestError) -> ErrorBody:
    """The body for `error`; its status is `error.status`."""
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    kind = "server_error" if error.status >= 500 else TYPES.get(error.status, "invalid_request_error")
    return ErrorBody(ErrorDetail(message, kind, error.param, error.code))


def respond(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """The whole answer."""
    body = msgspec.json.encode(error_body(error))
    headers = {**HEADERS.get(error.status, {}), **(headers or {})}
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


async def _on_request_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    assert isinstance(error, RequestError)
    return respond(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = {404: f"no route {request.url.path!r}", 405: f"{request.method} is not allowed here"}.get(error.status_code, error.detail)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return respond(RequestError(what, status=error.status_code, code=code), dict(error.headers or {}))


async def _on_client_gone(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    """Whatever else a handler raises: the client learns nothing of our insides, the HTTP server logs the traceback."""
    return respond(RequestError("an internal error; the server's log tells more", status=500, code="internal_error"))


EXCEPTION_HANDLERS = {
    RequestError: _on_request_error,
    HTTPException: _on_http_exception,
    ClientGoneError: _on_client_gone,
    Exception: _on_bug,
}
"""For Starlette's `exception_handlers`."""
