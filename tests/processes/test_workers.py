"""A child process as its parent sees it, where the child does what no real one can be made to do."""

from __future__ import annotations

import logging
import subprocess

from minisgl.processes.workers import Worker


class Undying:
    """A process that the system keeps after SIGKILL, as it does while a call into a device's driver does not return."""

    pid = 1234

    def __init__(self):
        self.signals = []

    def poll(self):
        return None

    def kill(self):
        self.signals.append("KILL")

    def wait(self, timeout=None):
        assert timeout is not None, "without a limit this would wait for ever"
        raise subprocess.TimeoutExpired("child", timeout)


def test_a_killed_process_that_does_not_go_is_told_of_and_not_waited_for(caplog):
    process = Undying()
    with caplog.at_level(logging.ERROR, logger="minisgl.processes.workers"):
        Worker("scheduler", process, -1).end(0)
    assert process.signals == ["KILL"]
    assert "the scheduler process (pid 1234) was killed and is still there" in caplog.text
