"""What answers of POST /v1/completions look like. Knows no frontend. Called by `generation`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.server.answers import Completion, CompletionChoice, Usage
from minisgl.server.frontend import Piece
from minisgl.server.logprobs import completion_logprobs, scored_tokens
from minisgl.server.protocol import CompletionRequest

__all__ = ["CompletionFormat"]


class CompletionFormat:
    """One request's answer. An echoed prompt is the beginning of the outputs' texts already."""

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._has_usage = request.has_usage_chunk
        self._num_top = request.logprobs
        self._has_prompt_logprobs = request.prompt_logprobs is not None

    def opening(self, num_outputs: int) -> Iterator[msgspec.Struct]:  # noqa: ARG002 - nothing to tell of them yet
        yield from ()

    def events(self, piece: Piece) -> Iterator[msgspec.Struct]:
        """The text, with the ending in the last one."""
        usage: UnsetType | None = None if self._has_usage else UNSET
        yield Completion(self.id, self._created, self._model, [self._choice(piece)], usage)

    def closing(self, usage: Usage) -> Iterator[msgspec.Struct]:
        """The usage, if it was asked for."""
        if self._has_usage:
            yield Completion(self.id, self._created, self._model, [], usage)

    def whole(self, outputs: Sequence[Piece], usage: Usage) -> Completion:
        return Completion(self.id, self._created, self._model, [self._choice(output) for output in outputs], usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        has_logprobs = self._num_top is not None and (piece.scores or piece.final is not None)
        return CompletionChoice(
            piece.text,
            piece.index,
            None if piece.final is None else piece.final.finish_reason or "stop",
            completion_logprobs(piece.scores, num_top=self._num_top or 0) if has_logprobs else None,
            scored_tokens(piece.prompt_scores) if self._has_prompt_logprobs else UNSET,
        )
