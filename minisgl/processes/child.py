"""Whoever has started it, as a child process sees it: its setup, its orders, where to report, and that it is still there.

Standard input brings one JSON line with the setup, then orders, one a line; its end means that the parent is gone, and then a child goes
too, whatever it is doing. Reports go as JSON lines through an inherited pipe. Signals are the parent's business: it blocks SIGINT and
SIGTERM for its children.

Knows no HTTP, no model, no message. Called by the children's programs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from minisgl.errors import MinisglError
from minisgl.processes.logs import configure_logging
from minisgl.processes.run_files import remove_run_files
from minisgl.processes.setup import ChildSetup
from minisgl.utils.heartbeat import Heart

__all__ = ["PRIMARY", "Child", "Divergence", "Order", "Report", "ReportKind", "run_child"]

logger = logging.getLogger(__name__)

STDIN = 0
PRIMARY = "scheduler"
"""Name of the child that is rank 0."""
ReportKind = Literal["stage", "ready", "limits", "open", "drained", "failed", "diverged", "steps"]


class Report(msgspec.Struct, frozen=True):
    """What a child tells its parent."""

    kind: ReportKind
    text: str = ""
    """stage, ready: what has been done and is worth saying; limits: EngineLimits in JSON; open, steps: that order is carried out; drained:
    no request is left; failed: why; diverged: a Divergence in JSON"""


class Divergence(msgspec.Struct, frozen=True):
    """A rank's step differs from rank 0's; see scheduler.agreement.DivergedError."""

    step: int
    field: str
    rank: int


class Order(msgspec.Struct, frozen=True):
    """What a child is told."""

    kind: Literal["open", "drain", "close", "steps"]
    """open: all processes are ready; drain: take no new request and tell when none is left; close: end what is pending with an error, go;
    steps: write the last steps into the run directory"""
    text: str = ""
    """drain, close: why, fit for a user's eyes"""


class Child:
    """This process, a child of a server's launcher or of an offline class."""

    def __init__(
        self, setup: ChildSetup, on_order: Callable[[Order], None] = lambda _: None, on_parent_gone: Callable[[], None] = lambda: None
    ) -> None:
        """The two functions are called in the thread that watches standard input; they may be replaced."""
        self.setup = setup
        self.on_order = on_order
        self.on_parent_gone = on_parent_gone
        self.config = setup.config
        self.heart = Heart(setup.heartbeat_fd, setup.place)

    def report(self, kind: ReportKind, text: str = "") -> None:
        """Tell the parent. If it is gone there is nobody to tell."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.setup.report_fd, msgspec.json.encode(Report(kind, text)) + b"\n")

    def exit_now(self) -> None:
        """Leave at once: no cleanup of Python's, which might wait for a thread or a lock; only the sockets' files are removed."""
        remove_run_files(self.config)
        os._exit(1)


def run_child(
    main: Callable[[Child], None],
    *,
    on_order: Callable[[Order], None] = lambda _: None,
    on_parent_gone: Callable[[], None] = lambda: None,
) -> int:
    """Run a child's program; returns its exit status. The cause of a failure is reported and, if it is a bug, logged with its traceback.

    `on_order` and `on_parent_gone` are called in the thread that watches standard input; after the latter the process ends.
    """
    configure_logging()
    lines = _lines(STDIN)
    setup = next(lines, None)
    if setup is None:  # the parent has gone already
        return 1
    child = Child(msgspec.json.decode(setup, type=ChildSetup), on_order, on_parent_gone)
    child.heart.start()
    threading.Thread(target=_watch, args=(child, lines), name="watch-parent", daemon=True).start()
    try:
        main(child)
    except MinisglError as error:
        child.report("failed", str(error))
        return 1
    except Exception as error:  # the boundary of the process: the cause goes to whoever started it
        logger.exception("unexpected error")
        child.report("failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


def _watch(child: Child, lines: Iterator[bytes]) -> None:
    for line in lines:
        child.on_order(msgspec.json.decode(line, type=Order))
    try:
        child.on_parent_gone()
    finally:
        child.exit_now()


def _lines(descriptor: int) -> Iterator[bytes]:
    """Lines until the end of the file. Unbuffered: a thread that sleeps in a buffered read holds a lock that Python's exit wants."""
    rest = b""
    while block := os.read(descriptor, 65536):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
