"""The HTTP application: which route does what, how a body is read. Knows no process and no address. Called by the API process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from minisgl import __version__
from minisgl.errors import RequestError
from minisgl.message import DecodeMsg, FlushCacheMsg
from minisgl.server.answers import AbortAnswer, Model, ModelList, Status, TextAnswer, Version
from minisgl.server.chat_completions import ChatFormat
from minisgl.server.completions import CompletionFormat
from minisgl.server.defaults import SamplingDefaults
from minisgl.server.frontend import ClientGoneError, Frontend, Job, Piece
from minisgl.server.gate import guarded
from minisgl.server.generate import GenerateFormat
from minisgl.server.generation import GenerationResponse
from minisgl.server.health import Health
from minisgl.server.http_errors import EXCEPTION_HANDLERS
from minisgl.server.http_options import HttpOptions
from minisgl.server.metrics import Metrics
from minisgl.server.openapi import openapi_document
from minisgl.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    decode_body,
)

__all__ = ["create_app"]

T = TypeVar("T")
LONG_BODY_BYTES = 1024 * 1024
"""Decoding one that is longer keeps others waiting."""


def create_app(
    frontend: Frontend,
    model_name: str,
    on_started: Callable[[], None] = lambda: None,
    defaults: SamplingDefaults | None = None,
    health: Health | None = None,
    options: HttpOptions | None = None,
) -> ASGIApp:
    """The application that serves `model_name` through `frontend`. `on_started` is called when requests can be taken; `defaults` are the
    model's sampling parameters (None: OpenAI's); without `health` no process is watched."""
    options = options or HttpOptions()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with frontend.running():
            on_started()
            yield

    app = Starlette(
        routes=[
            *(health or Health(frontend)).routes(),
            *Metrics(frontend.counts, model_name).routes(),
            *_Api(frontend, model_name, (defaults or SamplingDefaults()).values, options.max_body_bytes).routes(),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return guarded(app, options)


class _Api:
    """The routes that have to do with the model."""

    def __init__(self, frontend: Frontend, model_name: str, defaults: dict[str, Any], max_body_bytes: int) -> None:
        self._frontend = frontend
        self._max_body_bytes = max_body_bytes
        self._model = Model(model_name, int(time.time()))
        self._defaults = defaults
        self._openapi = msgspec.json.encode(openapi_document(__version__))

    def routes(self) -> list[Route]:
        post = ["POST"]
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=post),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/generate", self.generate, methods=post),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/flush_cache", self.flush_cache, methods=post),
            Route("/abort", self.abort, methods=post),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
        ]

    async def chat_completions(self, request: Request) -> Response:
        body = await self._decode(request, ChatRequest)
        job = body.job(self._defaults)
        return GenerationResponse(self._frontend, [job], ChatFormat(body, self._model.id), is_stream=bool(body.stream))

    async def completions(self, request: Request) -> Response:
        body = await self._decode(request, CompletionRequest)
        jobs = body.jobs(self._defaults)
        return GenerationResponse(self._frontend, jobs, CompletionFormat(body, self._model.id), is_stream=bool(body.stream))

    async def generate(self, request: Request) -> Response:
        body = await self._decode(request, GenerateRequest)
        job = body.job(self._defaults)
        return GenerationResponse(self._frontend, [job], GenerateFormat(job), is_stream=bool(body.stream))

    async def tokenize(self, request: Request) -> Response:
        body = await self._decode(request, TokenizeRequest)
        ids = (await self._ask(request, body.job())).texts
        blocks = ['{"tokens":', *ids, f',"count":{1 + sum(part.count(",") for part in ids)}}}']  # a TokensAnswer, already in JSON
        headers = {"Content-Length": str(sum(map(len, blocks)))}
        return StreamingResponse(_encoded(blocks), headers=headers, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        body = await self._decode(request, DetokenizeRequest)
        answer = await self._ask(request, DecodeMsg(0, body.tokens, bool(body.skip_special_tokens)))
        return _json(TextAnswer(answer.text))

    async def flush_cache(self, request: Request) -> Response:
        await read_body(request, self._max_body_bytes)
        await self._ask(request, FlushCacheMsg(0))
        return _json(Status())

    async def abort(self, request: Request) -> Response:
        body = decode_body(await read_body(request, self._max_body_bytes), AbortRequest)
        return _json(AbortAnswer(self._frontend.abort(body.id)))

    async def models(self, _: Request) -> Response:
        return _json(ModelList([self._model]))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._model)

    async def version(self, _: Request) -> Response:
        return _json(Version(__version__))

    async def openapi(self, _: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def _decode(self, request: Request, kind: type[T]) -> T:
        """The body, whose `model` is the served one."""
        text = await read_body(request, self._max_body_bytes)
        # A thread holds Python's lock too, but lets go of it between two steps.
        body = decode_body(text, kind) if len(text) <= LONG_BODY_BYTES else await run_in_threadpool(_decode_long, text, kind)
        self._check_model(getattr(body, "model", None))
        return body

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.id:
            text = f"model: {name!r} is not served here; {self._model.id!r} is"
            raise RequestError(text, status=404, code="model_not_found", param="model")

    async def _ask(self, request: Request, job: Job) -> Piece:
        """The workers' whole answer to something that generates nothing."""
        answer = Piece(0)
        async with self._frontend.open(request.receive, [job]) as group:
            while answer.final is None:
                answer.add(await group.next_piece())
        return answer


def _decode_long(text: bytes, kind: type[T]) -> T:
    """Without the garbage collector, which would look at each of a million new values several times while everybody waits."""
    gc.disable()
    try:
        return decode_body(text, kind)
    finally:
        gc.enable()


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _encoded(parts: Iterable[str]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part.encode()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises RequestError as soon as it has more than `max_bytes` or if the server ends meanwhile, ClientGoneError if the
    client leaves before its end."""
    blocks: list[bytes] = []
    num_bytes = 0
    try:
        async for block in request.stream():
            num_bytes += len(block)
            if num_bytes > max_bytes:
                text = f"the body has more than {max_bytes} bytes, which is what is allowed"
                raise RequestError(text, status=413, code="request_too_large")
            blocks.append(block)
    except ClientDisconnect:
        raise ClientGoneError from None
    except asyncio.CancelledError:  # by the HTTP server, which has waited long enough
        raise RequestError("the server has been stopped", status=503, code="server_stopped") from None
    return b"".join(blocks)
