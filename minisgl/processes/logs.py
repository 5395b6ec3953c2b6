"""How child processes log: a record is one line, and a traceback's lines are set off, whatever a client wrote into them.

Knows the standard library only. Called by the children's programs.
"""

from __future__ import annotations

import logging
import re
import sys
from contextvars import ContextVar
from typing import Any

__all__ = ["REQUEST_ID", "SafeFormatter", "configure_logging"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request on whose behalf something is done, in the task that does it."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_LINE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 20_000
MARGIN = "  | "
"""Before each line of a traceback: no line of one can pass for a record."""
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that end a line, drive a terminal or turn the order of writing."""


class SafeFormatter(logging.Formatter):
    """Shows control characters as escapes and cuts what is too long."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """As the base class."""
        request_id = REQUEST_ID.get()
        return _safe(super().formatMessage(record)) + (f" [request {_safe(request_id)}]" if request_id else "")

    def formatException(self, ei: Any) -> str:
        """As the base class."""
        text = _cut(super().formatException(ei), MAX_TRACEBACK_CHARS)
        return "\n".join(MARGIN + _safe(line) for line in text.split("\n"))


def configure_logging() -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _safe(text: str) -> str:
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), _cut(text, MAX_LINE_CHARS))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"
