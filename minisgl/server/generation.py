"""Runs one generating request while its answer is being sent, whole or as a stream of events (hops 1 and 12).

Nothing is sent before the tokenizer has accepted or rejected every prompt, so that a refusal is always a plain answer with its status.
What the answer looks like is a `Format`'s business. Knows the frontend; no socket, no tokenizer. Called by the app.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg
from minisgl.server.answers import PromptTokensDetails, Usage
from minisgl.server.frontend import ClientGoneError, Frontend, Group, Piece
from minisgl.server.http_errors import error_body

__all__ = ["Format", "GenerationResponse"]

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Connection": "close"}
"""Whoever stands between us and the client must neither keep nor collect the events. The connection's end is the stream's: a client that
does not understand the event of an error sees that nothing follows it."""
LAST_EVENT = b"data: [DONE]\n\n"


class Format(Protocol):
    """What an answer looks like."""

    id: str
    """by which the request can be aborted"""

    def opening(self, num_outputs: int) -> Iterable[msgspec.Struct]:
        """Events that come before all text."""

    def events(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """Events for what is new of one output."""

    def closing(self, usage: Usage) -> Iterable[msgspec.Struct]:
        """Events that come after all endings."""

    def whole(self, outputs: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        """The one body; `outputs` are whole."""


class GenerationResponse(Response):
    """The answer to one request, which runs while this response is being sent: leaving it, however, ends the request."""

    def __init__(self, frontend: Frontend, jobs: Sequence[TokenizeMsg], form: Format, *, is_stream: bool) -> None:
        """`jobs`: one for each prompt, all with the same parameters."""
        super().__init__()
        self._frontend, self._jobs, self._form, self._is_stream = frontend, jobs, form, is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError or ClientGoneError before anything was sent; a stream that has begun ends with an error event."""
        async with self._frontend.open(receive, self._jobs, self._form.id) as group:
            await group.accepted()
            if self._is_stream:
                await self._stream(group, scope, send)
                return
            whole = await self._whole(group)
        await whole(scope, receive, send)

    async def _whole(self, group: Group) -> Response:
        outputs = [Piece(index) for index in range(len(group.tickets))]
        while any(output.final is None for output in outputs):
            piece = await group.next_piece()
            outputs[piece.index].add(piece)
        body = self._form.whole(outputs, self._usage(outputs))
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _stream(self, group: Group, scope: Scope, send: Send) -> None:
        headers = Response(headers=STREAM_HEADERS, media_type="text/event-stream").raw_headers
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for events in self._events(group, scope):
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except RequestError as error:
            await send({"type": "http.response.body", "body": _event(error_body(error)), "more_body": True})
        except ClientGoneError:
            return
        await send({"type": "http.response.body", "body": b""})

    async def _events(self, group: Group, scope: Scope) -> AsyncIterator[bytes]:
        """All events but those that the connection takes at once; those that come at the same time are joined."""
        yield _joined(self._form.opening(len(group.tickets)))
        connection = scope.get("state", {}).get("connection")
        if connection is not None:
            group.on_backlog = connection.check_backlog
            group.flush = connection.flush_chunks
        if connection is not None and scope["http_version"] == "1.1":  # others get no chunks
            group.write_now = lambda piece: connection.write_chunk(_joined(self._form.events(piece)))
        endings: dict[int, Piece] = {}
        while len(endings) < len(group.tickets):
            piece = await group.next_piece()
            if piece.final is not None:
                endings[piece.index] = piece
            yield _joined(self._form.events(piece))
        usage = self._usage([endings[index] for index in sorted(endings)])
        yield _joined(self._form.closing(usage)) + LAST_EVENT

    def _usage(self, outputs: Sequence[Piece]) -> Usage:
        """Of outputs that have ended; each prompt counts once, for its first choice."""
        finals = [output.final for output in outputs if output.final is not None]
        firsts = finals[:: self._jobs[0].sampling_params.n]
        num_prompt = sum(final.num_prompt_tokens for final in firsts)
        num_completion = sum(final.num_completion_tokens for final in finals)
        cached = PromptTokensDetails(sum(final.num_cached_tokens for final in firsts))
        return Usage(num_prompt, num_completion, num_prompt + num_completion, cached)


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _joined(bodies: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(map(_event, bodies))
