"""POST /v1/chat/completions: one chat, one answer, whole or as a stream of events (hops 1 and 12).

Nothing is sent before the tokenizer has accepted or rejected the prompt, so that a refusal is always a plain answer with its status.
Knows the frontend and the protocol; no socket, no tokenizer. Called by the app.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.core import SamplingParams
from minisgl.errors import RequestError
from minisgl.message import UserReply
from minisgl.server.frontend import ClientGoneError, Frontend, Ticket
from minisgl.server.http_errors import error_body
from minisgl.server.protocol import (
    Answer,
    AnswerChoice,
    AnswerMessage,
    ChatRequest,
    Chunk,
    ChunkChoice,
    Delta,
    PromptTokensDetails,
    Usage,
)

__all__ = ["ChatResponse"]

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Whoever stands between us and the client must neither keep nor collect the events."""
LAST_EVENT = b"data: [DONE]\n\n"


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _usage(final: UserReply) -> Usage:
    total = final.num_prompt_tokens + final.num_completion_tokens
    return Usage(final.num_prompt_tokens, final.num_completion_tokens, total, PromptTokensDetails(final.num_cached_tokens))


@dataclass(frozen=True)
class _Identity:
    """What all parts of one answer have in common."""

    id: str
    created: int
    model: str

    def chunk(self, choices: list[ChunkChoice], *, usage: Usage | msgspec.UnsetType | None) -> bytes:
        return _event(Chunk(self.id, self.created, self.model, choices, usage=usage))


class ChatResponse(Response):
    """The answer to one request, which runs while this response is being sent: leaving it, however, ends the request."""

    def __init__(self, frontend: Frontend, request: ChatRequest, model: str) -> None:
        """Raises RequestError for a request that this version does not serve."""
        super().__init__()
        request.check()
        self._frontend = frontend
        self._request = request
        self._params: SamplingParams = request.sampling_params()
        self._identity = _Identity(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError or ClientGoneError before anything was sent; a stream that has begun ends with an error event."""
        async with self._frontend.open(receive, self._params, self._request.plain_messages()) as ticket:
            await ticket.accepted()
            if self._request.stream:
                await self._stream(ticket, send)
                return
            whole = await self._whole(ticket)
        await whole(scope, receive, send)

    async def _whole(self, ticket: Ticket) -> Response:
        texts: list[str] = []
        final: UserReply | None = None
        while final is None:
            piece = await ticket.next_piece()
            texts.append(piece.text)
            final = piece.final
        choice = AnswerChoice(AnswerMessage("".join(texts)), final.finish_reason or "stop")
        identity = self._identity
        answer = Answer(identity.id, identity.created, identity.model, [choice], _usage(final))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _stream(self, ticket: Ticket, send: Send) -> None:
        headers = Response(headers=STREAM_HEADERS, media_type="text/event-stream").raw_headers
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for event in self._events(ticket):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except RequestError as error:
            await send({"type": "http.response.body", "body": _event(error_body(error)), "more_body": True})
        except ClientGoneError:
            return
        await send({"type": "http.response.body", "body": b""})

    async def _events(self, ticket: Ticket) -> AsyncIterator[bytes]:
        """The role, the text, the ending, the usage if it was asked for, and the mark of the end."""
        options = self._request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        chunk, no_usage = self._identity.chunk, None if has_usage else UNSET
        yield chunk([ChunkChoice(Delta(role="assistant", content=""))], usage=no_usage)
        final: UserReply | None = None
        while final is None:
            piece = await ticket.next_piece()
            if piece.text:
                yield chunk([ChunkChoice(Delta(content=piece.text))], usage=no_usage)
            final = piece.final
        yield chunk([ChunkChoice(Delta(), final.finish_reason)], usage=no_usage)
        if has_usage:
            yield chunk([], usage=_usage(final))
        yield LAST_EVENT
