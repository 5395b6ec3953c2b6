"""Token ids to text while they arrive: never half a character, nothing twice, nothing lost, no part of a stop string.

Memory is bounded by three bytes (the start of a character) and the longest stop string; time is linear. The pieces joined are the
one-shot decode because the one-shot decode is this stream (`Tokenizer.decode`).

Knows nothing of requests, messages or usage. Called by the detokenizer process and the offline class, one stream per output.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from minisgl.tokenizer.pieces import TokenPieces
from minisgl.tokenizer.stops import StopFinder

__all__ = ["TextStream"]


class _HasPieces(Protocol):
    @property
    def pieces(self) -> TokenPieces: ...


class TextStream:
    """The text of one output, token by token. `tokenizer` is a `loader.Tokenizer`.

    `skip_special_tokens` leaves the tokenizer's special tokens out. `stop`: strings that end the text; the one completed first counts
    and is no part of the text, nor is what follows it. `continues`: the text is shown behind another one, so that a blank at its start
    stays. Raises RequestError if a stop is empty.
    """

    def __init__(
        self, tokenizer: _HasPieces, *, skip_special_tokens: bool = True, stop: tuple[str, ...] = (), continues: bool = False
    ) -> None:
        self._pieces = tokenizer.pieces
        self._hidden = self._pieces.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=self._pieces.rules.utf8_errors)
        self._stops = StopFinder(stop)
        self._num_strip = 0 if continues else self._pieces.rules.num_strip
        self._is_first = not continues
        self._stopped = False
        self.num_chars = 0
        """Characters that the tokens so far have made, those included that are held back."""

    @property
    def stopped(self) -> bool:
        """A stop string was completed: the text is whole, further tokens add nothing."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is now safe to show and was not returned before."""
        if self._stopped or token_id in self._hidden:
            return ""
        piece = self._pieces.piece(token_id, is_first=self._is_first)
        if piece is None:
            return ""
        self._is_first = False
        return self._show(self._utf8.decode(piece))

    def extend(self, token_ids: Iterable[int]) -> str:
        """The same as `push` of each, joined, in a fraction of the time."""
        pieces = []
        for token_id in token_ids:
            if token_id not in self._hidden and (piece := self._pieces.piece(token_id, is_first=self._is_first)) is not None:
                self._is_first = False
                pieces.append(piece)
        return "" if self._stopped else self._show(self._utf8.decode(b"".join(pieces)))

    def finish(self) -> str:
        """The output ended; returns the tail. An unfinished character shows as replacement characters."""
        if self._stopped:
            return ""
        text = self._show(self._utf8.decode(b"", final=True))
        return text if self._stopped else text + self._stops.release()

    def _show(self, text: str) -> str:
        if self._num_strip and text:
            text = self._strip_start(text)
        if not text:
            return ""
        self.num_chars += len(text)
        shown, self._stopped = self._stops.push(text)
        return shown

    def _strip_start(self, text: str) -> str:
        rest = text.lstrip(self._pieces.rules.strip_char)
        num_dropped = min(len(text) - len(rest), self._num_strip)
        self._num_strip = 0 if rest else self._num_strip - num_dropped
        return text[num_dropped:]
