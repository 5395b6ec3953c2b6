"""Ctrl-C between steps: a scheduler that is interrupted in the middle of one has a ledger that nobody can trust.

Knows signals only. Called by the offline class.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_held"]


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Within the block SIGINT is noted, and handed to its handler at the end. A second one is handed over at once.

    Signals reach the main thread only, so in others, and where SIGINT has no handler in Python, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            handler(number, frame)
        noted.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
