"""SIGINT and SIGTERM as something to wait for, beside whatever else is waited for.

Called by the launcher, in the main thread; `blocked_signals` by `children`, in any.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator

__all__ = ["Signals", "blocked_signals", "caught_signals"]

LAUNCHER_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ours to handle, even if they are sent to the whole process group: a child is born with them blocked."""


class Signals:
    """Signals as a file: readable when one has come."""

    def __init__(self, read_fd: int) -> None:
        self._read_fd = read_fd

    def fileno(self) -> int:
        return self._read_fd

    def take(self) -> int:
        """The number of the next one; waits for it."""
        return os.read(self._read_fd, 1)[0]

    def has_come(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            return bool(selector.select(0))


@contextlib.contextmanager
def caught_signals() -> Iterator[Signals]:
    """Inside, SIGINT and SIGTERM only make the yielded object readable."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    old_handlers = {number: signal.signal(number, lambda *_: None) for number in LAUNCHER_SIGNALS}
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        yield Signals(read_fd)
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait, and a child that is started is born with them blocked."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
