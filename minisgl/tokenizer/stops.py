"""Finding stop strings in text that arrives in pieces, and how much of it must be held back meanwhile.

Knows only strings. Called by `detokenize`.
"""

from __future__ import annotations

from minisgl.errors import RequestError

__all__ = ["StopFinder"]


class StopFinder:
    """Watches a text for several stop strings at once (Knuth, Morris and Pratt 1977, one automaton per stop): linear time, however the
    text is cut into pieces.

    The stop that is completed first ends the text; of several completed by the same character the longest counts.
    Raises RequestError for an empty stop.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise RequestError("stop: an empty string found; each stop is a string of at least one character", param="stop")
        self._stops = stops
        self._firsts = {stop[0] for stop in stops}
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece. Returns (text that can be no part of a stop, whether a stop was completed)."""
        if not self._stops or (not any(self._matched) and self._firsts.isdisjoint(text)):
            return text, False  # no stop has begun, and none begins here
        for place, char in enumerate(text):
            completed = self._step(char)
            if completed:
                seen = self._held + text[: place + 1]
                self._held = ""
                return seen[: len(seen) - completed], True
        buffer = self._held + text
        num_held = max(self._matched)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held], False

    def release(self) -> str:
        """The text ended: what was held back is no stop."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Advance all automata; the length of the longest stop that `char` completes, or 0."""
        completed = 0
        for which, stop in enumerate(self._stops):
            matched = self._matched[which]
            while matched and stop[matched] != char:
                matched = self._borders[which][matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                completed = max(completed, matched)
                matched = 0
            self._matched[which] = matched
        return completed


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for char in stop[1:]:
        matched = borders[-1]
        while matched and stop[matched] != char:
            matched = borders[matched - 1]
        borders.append(matched + (stop[matched] == char))
    return borders
