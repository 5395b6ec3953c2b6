"""Salts keep tenants' prefixes apart, and the idle check of the ledger logs, counts and, if so configured, raises."""

import logging
from collections import deque

import numpy as np
import pytest

from minisgl.core import SamplingParams
from minisgl.engine.base import EngineLimits
from minisgl.errors import IntegrityError
from minisgl.message import BatchTokenizerMsg, UserMsg
from minisgl.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.fake_engine import FakeEngine

LIMITS = EngineLimits(num_pages=64, page_size=4, max_seq_len=128, max_running_req=8, vocab_size=64)


class Offline(Scheduler):
    def __init__(self, **config):
        self.inbox, self.finals = deque(), {}
        super().__init__(SchedulerConfig(offline_mode=True, **config), FakeEngine(LIMITS))

    def offline_receive_msg(self, blocking=False):
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def offline_send_result(self, reply):
        for message in reply.data if isinstance(reply, BatchTokenizerMsg) else [reply]:
            if message.finished:
                self.finals[message.uid] = message

    def complete(self, uid, salt):
        self.inbox.append(UserMsg(uid, np.arange(20, dtype=np.int32), SamplingParams(max_tokens=2), cache_salt=salt))
        for _ in range(100):
            self.run_step()
            if uid in self.finals and self.is_idle:
                return self.finals[uid].num_cached_tokens
        raise AssertionError("the request did not end")


def test_prefixes_are_shared_within_a_salt_only():
    scheduler = Offline()
    assert scheduler.complete(1, "a") == 0
    assert scheduler.complete(2, "b") == 0
    assert scheduler.complete(3, None) == 0
    assert [scheduler.complete(4, "a"), scheduler.complete(5, "b"), scheduler.complete(6, None)] == [16, 16, 16]
    scheduler.check_integrity()


def plant(monkeypatch):
    def broken(self):
        raise IntegrityError("page 3 is in two places")

    monkeypatch.setattr(Scheduler, "check_integrity", broken)


def test_a_wrong_ledger_is_logged_and_counted_when_idle(monkeypatch, caplog):
    scheduler = Offline()
    scheduler.complete(1, None)
    plant(monkeypatch)
    with caplog.at_level(logging.ERROR):
        scheduler.run_when_idle()
        scheduler.run_when_idle()  # nothing has changed since: not walked again
    assert scheduler.num_integrity_errors == 1
    assert "page 3 is in two places" in caplog.text
    scheduler.complete(2, None)
    scheduler.run_when_idle()
    assert scheduler.num_integrity_errors == 2


def test_a_wrong_ledger_stops_a_scheduler_that_is_told_so(monkeypatch):
    scheduler = Offline(raise_integrity_errors=True)
    scheduler.complete(1, None)
    plant(monkeypatch)
    with pytest.raises(IntegrityError, match="page 3"):
        scheduler.run_when_idle()
