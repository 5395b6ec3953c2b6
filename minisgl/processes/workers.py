"""One child process as its parent sees it: started as `python -m MODULE`, it reports, gets orders, and is ended.

Started through subprocess, never multiprocessing, which would run the user's script again in the child. Knows no HTTP and no model.
Called by `children`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys

import msgspec

from minisgl.processes.child import Order, Report, ReportKind
from minisgl.processes.setup import ChildSetup

__all__ = ["KILLED_S", "Worker", "describe_exit"]

logger = logging.getLogger(__name__)

KILLED_S = 5
"""A killed process is gone in less."""


class Worker:
    """A child process. `fileno` is readable when `read_reports` has something to return."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], report_fd: int) -> None:
        self.name = name
        self.reported: dict[ReportKind, str] = {}
        """kinds of the reports that have been read, with the text of the last one"""
        self.num_stopped = 0
        """so often in a row `Children` has found it stopped"""
        self._process = process
        self._report_fd = report_fd
        self._rest = b""

    @classmethod
    def start(cls, name: str, module: str, setup: ChildSetup) -> Worker:
        """Start `python -m module`. `setup.report_fd` is filled in here; its other descriptors, if not negative, are inherited.

        SIGINT and SIGTERM must be blocked by the caller for the moment of this call.
        """
        read_fd, write_fd = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                pass_fds=[fd for fd in (write_fd, setup.listen_fd, setup.heartbeat_fd) if fd >= 0],
            )
        finally:
            os.close(write_fd)
        worker = cls(name, process, read_fd)
        worker._write(msgspec.json.encode(msgspec.structs.replace(setup, report_fd=write_fd)))
        return worker

    def fileno(self) -> int:
        return self._report_fd

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_reports(self) -> list[Report] | None:
        """What it has reported; waits for something. None if it has died: no report comes any more."""
        block = os.read(self._report_fd, 65536)
        if not block:
            return None
        *lines, self._rest = (self._rest + block).split(b"\n")
        reports = [msgspec.json.decode(line, type=Report) for line in lines]
        self.reported.update((report.kind, report.text) for report in reports)
        return reports

    def order(self, order: Order) -> None:
        """Tell it something; a dead one is told nothing."""
        self._write(msgspec.json.encode(order))

    def let_go(self) -> None:
        """Close its standard input, at which it goes."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, timeout: float) -> int | None:
        """Its exit status, negative for a signal; None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(max(timeout, 0.0))
        except subprocess.TimeoutExpired:
            return None

    def is_stopped(self) -> bool:
        """A signal keeps it from running, and none has let it go on. One that a debugger holds is not. False where it cannot be told."""
        if not hasattr(os, "waitid"):
            return False
        try:  # WNOWAIT: it is as stopped when asked again
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it has ended
            return False

    def strike(self) -> None:
        """Begin to end it by force, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()

    def end(self, timeout: float = KILLED_S) -> None:
        """End it by force, if it still runs, and wait so many seconds at most: a failed device can hold a killed process in the system."""
        self.strike()
        if self.wait(timeout) is None:
            logger.error("the %s process (pid %d) was killed and is still there", self.name, self.pid)

    def kill(self, timeout: float) -> None:
        """`end` it and forget it."""
        self.end(timeout)
        self.let_go()
        os.close(self._report_fd)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "it closed its report pipe and still runs"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with status {status}"
