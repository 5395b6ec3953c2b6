"""Emptying the prefix cache on demand: only between requests, and always with an answer."""

from collections import deque

import numpy as np
import pytest

from minisgl.core import SamplingParams
from minisgl.engine.base import EngineLimits
from minisgl.message import BatchTokenizerMsg, CacheFlushedMsg, FlushBackendMsg, UserMsg
from minisgl.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.fake_engine import FakeEngine

LIMITS = EngineLimits(num_pages=64, page_size=4, max_seq_len=128, max_running_req=8, vocab_size=64)


class Offline(Scheduler):
    def __init__(self, **config):
        self.inbox, self.heard = deque(), []
        super().__init__(SchedulerConfig(offline_mode=True, **config), FakeEngine(LIMITS))

    def offline_receive_msg(self, blocking=False):
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def offline_send_result(self, reply):
        self.heard += reply.data if isinstance(reply, BatchTokenizerMsg) else [reply]

    def start(self, uid):
        self.inbox.append(UserMsg(uid, np.arange(20, dtype=np.int32), SamplingParams(max_tokens=3)))

    def flush(self, uid):
        """The answer, which comes in the same step."""
        self.inbox.append(FlushBackendMsg(uid))
        self.run_step()
        (answer,) = [message for message in self.heard if isinstance(message, CacheFlushedMsg) and message.uid == uid]
        return answer.num_running

    def run_until_finals(self, num_finals):
        for _ in range(100):
            self.run_step()
            finals = [message for message in self.heard if getattr(message, "finished", False)]
            if len(finals) == num_finals:
                return finals
        raise AssertionError("the requests did not end")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_right_after_the_last_ending_empties_the_cache(overlap):
    scheduler = Offline(overlap=overlap)
    scheduler.start(1)
    scheduler.run_until_finals(1)
    assert scheduler.flush(7) == 0
    assert scheduler.page_counts.evictable == scheduler.page_counts.locked == 0
    scheduler.check_integrity()
    scheduler.start(2)
    assert scheduler.run_until_finals(2)[1].num_cached_tokens == 0


def test_a_flush_while_a_request_runs_says_so_and_changes_nothing():
    scheduler = Offline()
    scheduler.start(1)
    assert scheduler.flush(7) == 1
    scheduler.run_until_finals(1)
    scheduler.start(2)
    assert scheduler.run_until_finals(2)[1].num_cached_tokens == 16
