"""The HTTP application: which route does what, how a body is read. Knows no process and no address. Called by the API process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.errors import RequestError
from minisgl.server.chat_completions import ChatResponse
from minisgl.server.frontend import ClientGoneError, Frontend
from minisgl.server.http_errors import EXCEPTION_HANDLERS
from minisgl.server.protocol import ChatRequest, Model, ModelList, decode_body

__all__ = ["MAX_BODY_BYTES", "create_app"]

MAX_BODY_BYTES = 32 * 1024 * 1024
Endpoint = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]

NOT_IMPLEMENTED = (
    ("POST", "/v1/completions"),
    ("GET", "/v1/models/{model:path}"),
    ("POST", "/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/flush_cache"),
    ("POST", "/abort"),
    ("GET", "/version"),
    ("GET", "/health/ready"),
    ("GET", "/health/progress"),
)
"""Routes that a later version serves; until then they say so."""


def create_app(frontend: Frontend, model_name: str, on_started: Callable[[], None] = lambda: None) -> Starlette:
    """The application that serves `model_name` through `frontend`. `on_started` is called when requests can be taken."""
    created = int(time.time())

    async def health(_: Request) -> Response:
        if frontend.refusal is not None:
            raise frontend.refusal
        return _json({"status": "ok"})

    async def models(_: Request) -> Response:
        return _json(ModelList([Model(model_name, created)]))

    async def chat_completions(request: Request) -> Response:
        body = decode_body(await _read_body(request), ChatRequest)
        if body.model is not None and body.model != model_name:
            text = f"model: {body.model!r} is not served here; {model_name!r} is"
            raise RequestError(text, status=404, code="model_not_found", param="model")
        return ChatResponse(frontend, body, model_name)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with frontend.running():
            on_started()
            yield

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            *(Route(path, _not_implemented, methods=[method]) for method, path in NOT_IMPLEMENTED),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _not_implemented(request: Request) -> Response:
    raise RequestError(f"{request.url.path} is not implemented yet", status=501, code="not_implemented")


async def _read_body(request: Request) -> bytes:
    """The whole body. Raises RequestError as soon as it is too long, ClientGoneError if the client leaves before its end."""
    blocks: list[bytes] = []
    num_bytes = 0
    try:
        async for block in request.stream():
            num_bytes += len(block)
            if num_bytes > MAX_BODY_BYTES:
                text = f"the body has more than {MAX_BODY_BYTES} bytes, which is what is allowed"
                raise RequestError(text, status=413, code="request_too_large")
            blocks.append(block)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(blocks)
