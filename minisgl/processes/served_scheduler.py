"""The scheduler of a rank's process: tries the model out before it reports ready, shows when each step begins, and counts.

Loads torch. Called by the scheduler process, and by tests with an engine of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import numpy as np

from minisgl.core import Req, SamplingParams
from minisgl.engine.base import BaseEngine
from minisgl.errors import WorkerError
from minisgl.message import BackendReadyMsg, BaseBackendMsg, BaseTokenizerMsg, BatchTokenizerMsg, DetokenizeMsg, StatsMsg, UserMsg
from minisgl.processes.child import PRIMARY, Child, Divergence, Order
from minisgl.processes.scheduler_stats import StatsKeeper
from minisgl.processes.setup import STEP_TIMEOUT_S
from minisgl.scheduler.agreement import DivergedError, steps_path
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler
from minisgl.utils.heartbeat import BEAT_S, Heart, PulseReader

__all__ = ["ServedScheduler", "serve_scheduler"]

NUM_LOOKS = 3
"""So often in a row, a second apart, a waiting rank finds rank 0 at work, before it says so: rank 0 sends a message before it works."""
LAST_WORDS_S = 5.0
"""How long a rank that differs stays, while rank 0 is asked for its side: its end would break off what rank 0 is doing."""


class ServedScheduler(Scheduler):
    """A scheduler whose turns can be watched. `try_out` comes before `run_forever`, on every rank."""

    def __init__(self, config: SchedulerConfig, engine: BaseEngine, heart: Heart) -> None:
        self._heart = heart
        self._trial: list[BaseBackendMsg] | None = None
        """while the model is tried out: what is still to be heard"""
        self._trial_replies: list[BaseTokenizerMsg] = []
        self._rank = config.tp_info.rank
        self._stats = StatsKeeper() if config.tp_info.is_primary() else None
        self._is_primary_busy: Callable[[], bool] | None = None
        self._num_looks = 0
        super().__init__(config, engine)

    def try_out(self) -> None:
        """Let one request run from its message to its ending, the sockets left aside. Raises WorkerError if it does not end well."""
        params = SamplingParams(max_tokens=2, ignore_eos=True, top_p=0.9)  # so that a GPU's kernels for that are there
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

    def watch_primary(self, is_busy: Callable[[], bool]) -> None:
        """`is_busy` tells whether rank 0 is in a step, and alive."""
        self._is_primary_busy = is_busy

    def look_up(self) -> None:
        """As the base class. Raises DivergedError if rank 0 has work and this rank has found none, which neither's digests will tell."""
        if self._is_primary_busy is not None:
            self._num_looks = self._num_looks + 1 if self._is_primary_busy() else 0
            if self._num_looks >= NUM_LOOKS:
                raise DivergedError(self.step_digests()[0] + 1, "waiting", self._rank)

    def receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        """As the base class. A step lasts from one call's end to the next call's; none does while the call waits for a message.

        Now and then the numbers for the API are sent before.
        """
        if self._trial is not None:
            heard, self._trial = self._trial, []
            if heard:
                self.note_frames([BaseBackendMsg.encoder(message) for message in heard])
            return heard or super().receive_msg(False)  # digests of the trial are compared as any other
        if self._stats is not None and self._stats.end_turn(is_idle=blocking):
            num_running = self.num_unfinished - self.num_waiting
            self.send_result(StatsMsg(self._stats.stats(num_running, self.num_waiting, self.num_retractions, self.page_counts)))
        if blocking:
            self._heart.end_step()
            self._num_looks = 0
        messages = super().receive_msg(blocking)
        if self._stats is not None:
            self._stats.begin_turn(message.uid for message in messages if isinstance(message, UserMsg))
        self._heart.begin_step()
        return messages

    def note_admission(self, req: Req) -> None:
        """As the base class. The trial does not count."""
        if self._stats is not None and self._trial is None:
            self._stats.note_admission(req)

    def note_handled(self, is_decode: bool) -> None:
        """As the base class. The trial does not count."""
        if self._stats is not None and self._trial is None:
            self._stats.note_handled(is_decode)

    def send_result(self, reply: BaseTokenizerMsg) -> None:
        """As the base class."""
        if self._trial is not None:
            self._trial_replies.append(reply)
        else:
            super().send_result(reply)


def serve_scheduler(child: Child, scheduler: ServedScheduler) -> None:
    """Try the engine out, report, serve until the process is ended from outside. Called on every rank; rank 0 reports for all.

    Raises DivergedError, which is reported already, if this rank differs from rank 0.
    """
    config = child.config
    path = steps_path(config._unique_suffix, config.tp_info.rank)

    def obey(order: Order) -> None:
        if order.kind == "steps":
            scheduler.write_last_steps(path)
            child.report("steps")

    child.on_order, child.on_parent_gone = obey, scheduler.end_recording
    if not config.tp_info.is_primary():
        scheduler.watch_primary(_primary_watch(child))
    try:
        _serve(child, scheduler)
    except DivergedError as error:
        scheduler.write_last_steps(path)
        child.report("diverged", msgspec.json.encode(Divergence(error.step, error.field, error.rank)).decode())
        threading.Event().wait(LAST_WORDS_S)
        raise


def _primary_watch(child: Child) -> Callable[[], bool]:
    reader, place = PulseReader(child.setup.heartbeat_fd), child.setup.workers.index(PRIMARY)

    def is_busy() -> bool:
        pulse = reader.read()[place]
        return pulse.step_s > 0 and pulse.silence_s < 2 * BEAT_S  # one that was stopped may go on any moment

    return is_busy


def _serve(child: Child, scheduler: ServedScheduler) -> None:
    limits = scheduler.engine.limits
    child.heart.set_step_timeout(child.setup.step_timeout or STEP_TIMEOUT_S[limits.device_type])
    scheduler.try_out()
    scheduler.sync_all_ranks()
    scheduler.send_result(BackendReadyMsg(max_seq_len=limits.max_seq_len, num_pool_tokens=limits.num_pool_tokens))
    if child.config.tp_info.is_primary():
        child.report("limits", msgspec.json.encode(limits).decode())
        pool = f"{limits.num_pages} pages of {limits.page_size} tokens, {limits.num_pool_tokens} tokens"
        child.report("ready", f"tried out on {limits.device_type}; at most {limits.max_running_req} requests at a time; KV pool: {pool}")
    scheduler.run_forever()
