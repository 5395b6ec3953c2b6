"""Several ranks, each a child process with the transport of a server; this process is their tokenizer side, over the same queues.

The children are started with a command of their own, never by running the user's program again, and go when this process does, however
it ends: they see the end of the pipe that it holds. Knows processes and messages; no prompt, no text, no HTTP. Loads no torch. Called by
the offline class.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import ExitStack

import msgspec

from minisgl.engine.base import EngineLimits
from minisgl.errors import IntegrityError, WorkerError
from minisgl.llm.backend import deliver
from minisgl.llm.interrupts import interrupts_held
from minisgl.llm.output import Output
from minisgl.message import (
    AbortBackendMsg,
    BackendReadyMsg,
    BaseBackendMsg,
    BaseTokenizerMsg,
    BatchBackendMsg,
    CacheFlushedMsg,
    FlushBackendMsg,
    SchedulerStats,
    StatsMsg,
    UserMsg,
)
from minisgl.processes.child import PRIMARY
from minisgl.processes.children import LOOK_S, Children, rank_programs
from minisgl.processes.run_files import claim_run_files, remove_run_files
from minisgl.scheduler.config import SchedulerConfig
from minisgl.utils import ZmqPullQueue, ZmqPushQueue, wait_any

__all__ = ["RankProcesses"]

logger = logging.getLogger(__name__)

FLUSH_UID = -1
"""No request has it."""


class RankProcesses:
    """A Backend of `config.tp_info.size` processes. Started by `start`; closed by `close`, with the object, or with this process."""

    def __init__(self, config: SchedulerConfig, children: Children, resources: ExitStack) -> None:
        """Connect to `children`, which are started; everything opened here goes onto `resources`."""
        self.outputs: dict[int, Output] = {}
        self._children = children
        self._inbox = resources.enter_context(
            ZmqPullQueue[BaseTokenizerMsg](config.zmq_detokenizer_addr, create=True, decoder=BaseTokenizerMsg.decoder)
        )
        self._outbox = resources.enter_context(
            ZmqPushQueue[BaseBackendMsg](config.zmq_backend_addr, create=False, encoder=BaseBackendMsg.encoder)
        )
        self._orders: list[UserMsg | AbortBackendMsg | FlushBackendMsg] = []
        """not sent yet"""
        self._stats: SchedulerStats | None = None
        """rank 0's numbers, if it has sent them since the last result"""
        self._flushed: CacheFlushedMsg | None = None
        self._is_in_step = False
        children.wait_until_ready()
        self.limits = msgspec.json.decode(children.reported_by(PRIMARY, "limits"), type=EngineLimits)
        self.is_overlapped = config.is_overlapped(self.limits.is_asynchronous)
        self._close = weakref.finalize(self, _release, resources.pop_all(), os.getpid())

    @classmethod
    def start(cls, config: SchedulerConfig) -> RankProcesses:
        """Start a process for each rank and wait until all have computed something. Raises WorkerError with the cause if one fails."""
        with ExitStack() as resources:
            # 1. The socket files, which go last.
            claim_run_files(config)
            resources.callback(remove_run_files, config)
            # 2. The processes, which load the model.
            children = Children(logger.info)
            resources.callback(children.stop, "")
            children.start(rank_programs(config.tp_info.size), config)
            # 3. Our ends of the queues.
            return cls(config, children, resources)

    @property
    def num_retractions(self) -> int:
        """As the base class. Rank 0 tells its numbers before it waits for messages."""
        while self._stats is None or self._stats.num_running + self._stats.num_waiting:
            self.run_step()
        return self._stats.num_retractions

    def submit(self, message: UserMsg, output: Output) -> None:
        self.outputs[message.uid] = output
        self._orders.append(message)
        self._stats = None

    def abort(self, uid: int) -> None:
        del self.outputs[uid]
        self._orders.append(AbortBackendMsg(uid))

    def run_step(self) -> None:
        """Wait for one message of rank 0's and hand it to the outputs. Ctrl-C takes effect while waiting, and never in between."""
        self._send()
        try:
            while 0 not in wait_any([self._inbox, *self._children.workers], LOOK_S):
                self._children.check()
        except WorkerError as error:
            self._end_outputs(str(error))
            raise
        with interrupts_held():
            self._is_in_step = True
            try:
                self._handle(self._inbox.get(0))
            except BaseException as error:
                self._orders += [AbortBackendMsg(uid) for uid in self.outputs]
                self._end_outputs(f"the output could not be taken: {error!r}")
                raise
            finally:
                self._is_in_step = False
                self._send()

    def settle(self) -> None:
        # An iterator may be closed by the garbage collector, in the middle of a step.
        if not self._is_in_step:
            self._send()

    def reset_prefix_cache(self) -> None:
        self._flushed = None
        self._orders.append(FlushBackendMsg(FLUSH_UID))
        while self._flushed is None:
            self.run_step()
        if self._flushed.num_running:
            raise IntegrityError(f"{self._flushed.num_running} requests run on the ranks, and nobody waits for them")

    def close(self) -> None:
        self._close()

    def _send(self) -> None:
        """Everything in one frame, so that it is heard together."""
        orders, self._orders = self._orders, []
        if orders:
            self._outbox.put(orders[0] if len(orders) == 1 else BatchBackendMsg(list(orders)))

    def _handle(self, message: BaseTokenizerMsg) -> None:
        if isinstance(message, StatsMsg):
            self._stats = message.stats
        elif isinstance(message, CacheFlushedMsg):
            self._flushed = message
        elif not isinstance(message, BackendReadyMsg):
            self._stats = None
            self._orders += [AbortBackendMsg(uid) for uid in deliver(message, self.outputs)]

    def _end_outputs(self, why: str) -> None:
        for output in self.outputs.values():
            output.end("error", error=why)
        self.outputs.clear()


def _release(resources: ExitStack, owner: int) -> None:
    """Close everything, unless this is a forked copy of the process that it belongs to."""
    if os.getpid() == owner:
        resources.close()
