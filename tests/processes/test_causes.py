"""Which child is named: one that dies takes others along, and their reports may come before the end of its own pipe."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from minisgl.errors import WorkerError
from minisgl.processes import children
from minisgl.processes.child import Report
from minisgl.processes.children import Children


class Rank:
    """A worker that reports what it is told to."""

    pid = 7

    def __init__(self, name):
        self.name, self.reported, self._reports = name, {}, []
        self._ours, self._its = os.pipe()

    def fileno(self):
        return self._ours

    def say(self, kind, text=""):
        self._reports.append(Report(kind, text))
        os.write(self._its, b".")

    def die(self):
        os.close(self._its)

    def read_reports(self):
        if not os.read(self._ours, 100):
            return None
        reports, self._reports = self._reports, []
        self.reported.update((report.kind, report.text) for report in reports)
        return reports

    def wait(self, timeout):
        return -signal.SIGKILL

    def is_stopped(self):
        return False


@pytest.fixture
def ranks():
    return [Rank(name) for name in ("scheduler", "scheduler rank 1", "scheduler rank 2")]


@pytest.fixture
def family(ranks):
    found = Children(lambda stage: None)
    found._workers, found._ranks = list(ranks), list(ranks)
    return found


def test_a_rank_that_dies_a_moment_after_another_has_failed_is_the_one_that_is_named(family, ranks, monkeypatch):
    monkeypatch.setattr(children, "CAUSE_S", 60.0)
    ranks[0].say("failed", "connection reset by peer")
    timer = threading.Timer(0.05, ranks[1].die)
    timer.start()
    with pytest.raises(WorkerError, match=r"^the scheduler rank 1 process \(pid 7\) died: it was ended by SIGKILL"):
        family.check()
    timer.join()
    assert family.failed == "the scheduler rank 1 process"


def test_a_rank_that_fails_alone_is_named_after_a_moment(family, ranks, monkeypatch):
    monkeypatch.setattr(children, "CAUSE_S", 0.05)
    ranks[2].say("failed", "out of memory")
    ranks[1].say("stage", "is well")
    with pytest.raises(WorkerError, match=r"^the scheduler rank 2 process failed: out of memory$"):
        family.check()


def test_where_all_ranks_fail_nobody_is_waited_for(family, ranks, monkeypatch):
    monkeypatch.setattr(children, "CAUSE_S", 60.0)
    for rank in ranks:
        rank.say("failed", "out of memory")
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"^the scheduler process failed: out of memory$"):
        family.check()
    assert time.monotonic() - begin < 30
