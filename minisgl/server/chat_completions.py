"""What answers of POST /v1/chat/completions look like. Knows no frontend. Called by `generation`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.server.answers import Answer, AnswerChoice, AnswerMessage, Chunk, ChunkChoice, Delta, Usage
from minisgl.server.frontend import Piece
from minisgl.server.logprobs import chat_logprobs, scored_tokens
from minisgl.server.protocol import ChatRequest

__all__ = ["ChatFormat"]


class ChatFormat:
    """One request's answer."""

    def __init__(self, request: ChatRequest, model: str) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._has_usage = request.has_usage_chunk
        self._has_logprobs = bool(request.logprobs)
        self._has_prompt_logprobs = request.prompt_logprobs is not None

    def opening(self, num_outputs: int) -> Iterator[msgspec.Struct]:
        """The role, once for each choice."""
        for index in range(num_outputs):
            yield self._chunk(ChunkChoice(Delta(role="assistant", content=""), index=index))

    def events(self, piece: Piece) -> Iterator[msgspec.Struct]:
        """The text, then the ending."""
        if piece.texts or piece.scores:
            logprobs = chat_logprobs(piece.scores) if self._has_logprobs and piece.scores else None
            yield self._chunk(ChunkChoice(Delta(content=piece.text), index=piece.index, logprobs=logprobs))
        if piece.final is not None:
            yield self._chunk(ChunkChoice(Delta(), piece.final.finish_reason, piece.index))

    def closing(self, usage: Usage) -> Iterator[msgspec.Struct]:
        """The usage, if it was asked for."""
        if self._has_usage:
            yield Chunk(self.id, self._created, self._model, [], usage)

    def whole(self, outputs: Sequence[Piece], usage: Usage) -> Answer:
        return Answer(self.id, self._created, self._model, [self._choice(output) for output in outputs], usage)

    def _choice(self, output: Piece) -> AnswerChoice:
        assert output.final is not None
        return AnswerChoice(
            AnswerMessage(output.text),
            output.final.finish_reason or "stop",
            output.index,
            chat_logprobs(output.scores) if self._has_logprobs else None,
            scored_tokens(output.prompt_scores) if self._has_prompt_logprobs else UNSET,
        )

    def _chunk(self, choice: ChunkChoice) -> Chunk:
        usage: UnsetType | None = None if self._has_usage else UNSET
        return Chunk(self.id, self._created, self._model, [choice], usage)
