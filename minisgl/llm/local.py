"""One rank in this process: a scheduler in offline mode, whose both ends are here.

Knows messages and outputs; no prompt, no text. Loads torch. Called by the offline class.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch

from minisgl.engine.base import BaseEngine, EngineLimits
from minisgl.engine.engine import choose_device, make_engine
from minisgl.llm.backend import deliver
from minisgl.llm.interrupts import interrupts_held
from minisgl.llm.output import Output
from minisgl.message import AbortBackendMsg, BaseBackendMsg, BaseTokenizerMsg, UserMsg
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler

__all__ = ["LocalRank", "with_large_steps"]

LARGE_GPU_BYTES, LARGE_EXTEND_TOKENS = 128 * 2**30, 16_384


def with_large_steps(config: SchedulerConfig) -> SchedulerConfig:
    """On a GPU with memory for it, prefill steps of twice the usual size unless one is set: fewer decode steps, which are not full yet,
    stand between them."""
    device = choose_device(config)
    is_large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    return replace(config, max_extend_tokens=LARGE_EXTEND_TOKENS) if is_large and not config.max_extend_tokens else config


class _OfflineScheduler(Scheduler):
    """A scheduler whose messages come from a list and whose results go to the outputs of their uids."""

    def __init__(self, config: SchedulerConfig, engine: BaseEngine) -> None:
        self.inbox: deque[BaseBackendMsg] = deque()
        self.outputs: dict[int, Output] = {}
        super().__init__(config, engine)

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        """Everything queued. Nobody turns the loop without a request, so `blocking` finds one."""
        del blocking
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def offline_send_result(self, reply: BaseTokenizerMsg) -> None:
        self.inbox.extend(AbortBackendMsg(uid) for uid in deliver(reply, self.outputs))


class LocalRank:
    """A Backend around an engine in this process."""

    def __init__(self, config: SchedulerConfig, ids: tuple[frozenset[int], int | None] | None) -> None:
        """`ids`: see `make_engine`, which this calls."""
        self._config = config
        self._scheduler = _OfflineScheduler(config, make_engine(config, ids=ids))
        self._is_in_step = False

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def outputs(self) -> dict[int, Output]:
        return self._scheduler.outputs

    @property
    def limits(self) -> EngineLimits:
        return self._scheduler.engine.limits

    @property
    def is_overlapped(self) -> bool:
        return self._scheduler.is_overlapped

    @property
    def num_retractions(self) -> int:
        return self._scheduler.num_retractions

    def submit(self, message: UserMsg, output: Output) -> None:
        self._scheduler.outputs[message.uid] = output
        self._scheduler.inbox.append(message)

    def abort(self, uid: int) -> None:
        del self._scheduler.outputs[uid]
        self._scheduler.inbox.append(AbortBackendMsg(uid))

    def run_step(self) -> None:
        """One step. If it breaks off in its middle, the ledger cannot be trusted: a new one begins around the same engine."""
        scheduler = self._scheduler
        with interrupts_held():
            self._is_in_step = True
            try:
                scheduler.run_step()
            except BaseException as error:
                self._scheduler = _OfflineScheduler(self._config, scheduler.engine)
                for output in scheduler.outputs.values():
                    output.end("error", error=f"the engine's step broke off: {error!r}")
                scheduler.close()
                raise
            finally:
                self._is_in_step = False

    def settle(self) -> None:
        """Handle what is in flight once nothing else runs."""
        # An iterator may be closed by the garbage collector, in the middle of a step.
        while not self._is_in_step and not self.outputs and (self._scheduler.inbox or not self._scheduler.is_idle):
            self.run_step()

    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        self._scheduler.close()
