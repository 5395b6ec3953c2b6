"""The scheduler of a server's process: tries the model out before it reports ready, and shows when each step begins.

Loads torch. Called by the scheduler process, and by tests with an engine of their own.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import SamplingParams
from minisgl.engine.base import BaseEngine
from minisgl.errors import WorkerError
from minisgl.message import BackendReadyMsg, BaseBackendMsg, BaseTokenizerMsg, BatchTokenizerMsg, DetokenizeMsg, UserMsg
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler
from minisgl.server.child import Child
from minisgl.server.options import STEP_TIMEOUT_S
from minisgl.utils.heartbeat import Heart

__all__ = ["ServedScheduler", "serve_scheduler"]


class ServedScheduler(Scheduler):
    """A scheduler whose turns can be watched. `try_out` comes before `run_forever`, on every rank."""

    def __init__(self, config: SchedulerConfig, engine: BaseEngine, heart: Heart) -> None:
        self._heart = heart
        self._trial: list[BaseBackendMsg] | None = None
        """while the model is tried out: what is still to be heard"""
        self._trial_replies: list[BaseTokenizerMsg] = []
        super().__init__(config, engine)

    def try_out(self) -> None:
        """Let one request run from its message to its ending, the sockets left aside. Raises WorkerError if it does not end well."""
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        self._trial = [UserMsg(uid=0, input_ids=np.zeros(1, dtype=np.int32), sampling_params=params)]
        self.run_step()
        while not self.is_idle:
            self.run_step()
        self._trial = None
        replies = [one for reply in self._trial_replies for one in (reply.data if isinstance(reply, BatchTokenizerMsg) else [reply])]
        last = replies[-1] if replies else None
        if not isinstance(last, DetokenizeMsg) or last.finish_reason != "length":
            found = last.error if isinstance(last, DetokenizeMsg) and last.error else repr(last)
            raise WorkerError(f"the first request of one token did not work: {found}")

    def receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        """As the base class. A step lasts from one call's end to the next call's; none does while the call waits for a message."""
        if self._trial is not None:
            heard, self._trial = self._trial, []
            return heard
        if blocking:
            self._heart.end_step()
        messages = super().receive_msg(blocking)
        self._heart.begin_step()
        return messages

    def send_result(self, reply: BaseTokenizerMsg) -> None:
        """As the base class."""
        if self._trial is not None:
            self._trial_replies.append(reply)
        else:
            super().send_result(reply)


def serve_scheduler(child: Child, scheduler: ServedScheduler) -> None:
    """Try the engine out, report, serve until the process is ended from outside. Called on every rank; rank 0 reports for all."""
    limits = scheduler.engine.limits
    child.heart.set_step_timeout(child.setup.step_timeout or STEP_TIMEOUT_S[limits.device_type])
    scheduler.try_out()
    scheduler.sync_all_ranks()
    scheduler.send_result(BackendReadyMsg(max_seq_len=limits.max_seq_len, num_pool_tokens=limits.num_pool_tokens))
    if child.config.tp_info.is_primary():
        pool = f"{limits.num_pages} pages of {limits.page_size} tokens, {limits.num_pool_tokens} tokens"
        child.report("ready", f"tried out on {limits.device_type}; at most {limits.max_running_req} requests at a time; KV pool: {pool}")
    scheduler.run_forever()
