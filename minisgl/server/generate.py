"""What answers of POST /generate look like: text, token ids, ending and usage of one prompt. Knows no frontend. Called by `generation`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET

from minisgl.message import TokenizeMsg
from minisgl.server.answers import Generation, GenerationChunk, Usage
from minisgl.server.frontend import Piece
from minisgl.server.logprobs import scored_tokens

__all__ = ["GenerateFormat"]


class GenerateFormat:
    """One request's answer."""

    def __init__(self, job: TokenizeMsg) -> None:
        self.id = f"gen-{uuid.uuid4().hex}"
        self._params = job.sampling_params
        self._last: Piece | None = None

    def opening(self, num_outputs: int) -> Iterator[msgspec.Struct]:  # noqa: ARG002 - there is one
        """The id, by which the request can be aborted."""
        yield GenerationChunk(self.id, "", [])

    def events(self, piece: Piece) -> Iterator[msgspec.Struct]:
        """What is new; the last piece waits for the usage."""
        if piece.final is None:
            yield self._chunk(piece, None)
        else:
            self._last = piece

    def closing(self, usage: Usage) -> Iterator[msgspec.Struct]:
        assert self._last is not None
        yield self._chunk(self._last, usage)

    def whole(self, outputs: Sequence[Piece], usage: Usage) -> Generation:
        (output,) = outputs
        assert output.final is not None
        return Generation(
            self.id,
            output.text,
            output.token_ids,
            output.final.finish_reason or "stop",
            usage,
            UNSET if self._params.logprobs is None else scored_tokens(output.scores),
            UNSET if self._params.prompt_logprobs is None else scored_tokens(output.prompt_scores),
        )

    def _chunk(self, piece: Piece, usage: Usage | None) -> GenerationChunk:
        reason = None if piece.final is None else piece.final.finish_reason
        logprobs = UNSET if self._params.logprobs is None else scored_tokens(piece.scores)
        return GenerationChunk(self.id, piece.text, piece.token_ids, reason, usage, logprobs)
