"""What answers in a conversation, as the program sees it, and the one that computes in this process.

Knows the offline class by what is called of it; the command line hands one over. Called by the program.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, cast

from minisgl.core import SamplingParams
from minisgl.errors import MinisglError

__all__ = ["AnswerError", "Backend", "ChatLLM", "LocalBackend", "Messages", "Piece"]

Messages = Sequence[Mapping[str, str]]
"""`role` and `content` each."""


class AnswerError(MinisglError):
    """There is no answer, or only a part of one. The message says why; it may hold words of a server, which nobody has checked."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer; the last one, and only that, says why the answer ends."""

    text: str
    finish_reason: str | None = None


class Backend(Protocol):
    """What answers."""

    @property
    def name(self) -> str:
        """Of the model, to be shown."""

    @property
    def defaults(self) -> Mapping[str, Any] | None:
        """Of the sampling parameters; None: a server's own, which it does not tell."""

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The answer while it is being written. Closing the generator ends the request. Raises MinisglError, AnswerError for one."""

    def close(self) -> None:
        """Nothing will be asked any more."""


class ChatLLM(Protocol):
    """`minisgl.llm.LLM`, or something that acts like it."""

    def stream(self, prompt: Messages, sampling_params: SamplingParams, /) -> Iterator[Any]: ...

    def close(self) -> None: ...


class LocalBackend:
    """A model in this process."""

    def __init__(self, llm: ChatLLM, name: str, defaults: Mapping[str, Any]) -> None:
        self.name = name
        self.defaults = defaults
        self._llm = llm

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """As Backend says; without a seed in `params` the answer differs from time to time, unless it is greedy."""
        chosen = SamplingParams(**{"seed": secrets.randbits(64), **self.defaults, **params})
        stream = cast("Generator[Any, None, None]", self._llm.stream(messages, chosen))
        with closing(stream) as chunks:
            for chunk in chunks:
                if chunk.text:
                    yield Piece(chunk.text)
                if chunk.result is not None and chunk.result.error is not None:
                    raise AnswerError(chunk.result.error)
                if chunk.result is not None:
                    yield Piece("", chunk.result.finish_reason)

    def close(self) -> None:
        """Give the model's memory back."""
        self._llm.close()
