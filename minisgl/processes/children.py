"""All children of one server or one offline engine, which live and die together: started, waited for, drained, ended.

Knows what children report and obey, not what they do. Called by the launcher, which waits for signals beside, and by the offline class,
which does not.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.errors import WorkerError
from minisgl.processes.child import PRIMARY, Divergence, Order, Report, ReportKind
from minisgl.processes.setup import ChildSetup, settings_of
from minisgl.processes.signals import Signals, blocked_signals
from minisgl.processes.workers import KILLED_S, Worker, describe_exit
from minisgl.scheduler.agreement import explain_divergence
from minisgl.scheduler.config import SchedulerConfig
from minisgl.utils.heartbeat import PulseReader, make_heartbeat_file

__all__ = ["LOOK_S", "SCHEDULER_MODULE", "Children", "Program", "rank_programs"]

SCHEDULER_MODULE = "minisgl.processes.scheduler_process"
"""The program of a rank."""

LAST_WORDS_S = 4.0
"""How long the API may take to end pending requests; slightly more than it gives its clients."""
LEAVE_S = 2.0
"""How long the others may take to go by themselves."""
STEPS_S = 2.0
"""How long rank 0 may take to write its last steps, when another rank differs; it may sit in a collective."""
HURRIED_S = 0.5
"""Instead of both, once a second signal has come."""
CAUSE_S = 0.5
"""How long a rank that fails is not believed to be the first, while the others run."""
LOOK_S = 1.0
"""How often it is looked whether one of several ranks is stopped: the others wait for it within a step, for ever."""
NUM_LOOKS = 6
"""So often in a row, it will not go on. Counted, not measured: where all processes were stopped at once, none is to blame."""


@dataclass(frozen=True)
class Program:
    """A child to be started."""

    name: str
    module: str
    rank: int = 0
    """of a scheduler"""
    own: Mapping[str, Any] = field(default_factory=dict)
    """`ChildSetup.own`"""
    listens: bool = False
    """It gets the listening socket: the API."""
    reports_ready: bool = True
    """False: another one is ready for it."""


def rank_programs(num_ranks: int, module: str = SCHEDULER_MODULE) -> list[Program]:
    """A scheduler for each rank; rank 0 is ready for all of them."""
    others = (Program(f"{PRIMARY} rank {rank}", module, rank, reports_ready=False) for rank in range(1, num_ranks))
    return [Program(PRIMARY, module), *others]


class Children:
    """They are started once. Whatever a method raises, `stop` is still to be called."""

    def __init__(self, on_stage: Callable[[str], None]) -> None:
        """`on_stage` is called with what a child has done."""
        self.failed = "a process"
        """which child ended the server"""
        self._on_stage = on_stage
        self._workers: list[Worker] = []
        self._awaited: list[Worker] = []
        self._api: Worker | None = None
        self._is_hurried = False
        self._suffix = ""
        self._ranks: list[Worker] = []
        self._pulses: PulseReader | None = None
        self._last_look = 0.0

    @property
    def workers(self) -> Sequence[Worker]:
        """All that have been started; each is readable when `check` has something to do."""
        return self._workers

    def start(self, programs: Sequence[Program], config: SchedulerConfig, *, step_timeout: float = 0.0, listen_fd: int = -1) -> None:
        """Start all of them, in this order, with memory for their signs of life, of which they keep a copy each.

        `step_timeout`: see ChildSetup. `listen_fd`: the descriptor for the one that listens.
        """
        self._suffix = config._unique_suffix
        heartbeat_fd = make_heartbeat_file(len(programs))
        setup = ChildSetup({}, step_timeout, heartbeat_fd, [program.name for program in programs])
        try:
            for place, program in enumerate(programs):
                own = msgspec.structs.replace(
                    setup,
                    place=place,
                    settings=settings_of(config, program.rank),
                    listen_fd=listen_fd if program.listens else -1,
                    own=dict(program.own),
                )
                self._start(program, own)
            self._pulses = PulseReader(heartbeat_fd)
        finally:
            os.close(heartbeat_fd)

    def _start(self, program: Program, setup: ChildSetup) -> None:
        with blocked_signals():
            worker = Worker.start(program.name, program.module, setup)
            self._workers.append(worker)
        if program.reports_ready:
            self._awaited.append(worker)
        if program.listens:
            self._api = worker
        if program.name.startswith(PRIMARY):
            self._ranks.append(worker)

    def wait_until_ready(self, signals: Signals | None = None) -> int | None:
        """Return None when all are ready, or the number of a signal that came first. Raises WorkerError with a failed one's cause."""
        return self._handle_until(lambda: all("ready" in worker.reported for worker in self._awaited), signals)

    def open_doors(self, signals: Signals) -> int | None:
        """Let requests in. Returns and raises as `wait_until_ready`."""
        api = self._order_api(Order("open"))
        return self._handle_until(lambda: "open" in api.reported, signals)

    def watch(self, signals: Signals) -> int:
        """Wait for a signal; returns its number. Raises WorkerError if a child dies."""
        number = self._handle_until(lambda: False, signals)
        assert number is not None
        return number

    def drain(self, why: str, timeout: float, signals: Signals) -> None:
        """Take no new request and return when those that run have ended, after `timeout` seconds, or at a signal; then `stop` hurries.

        Raises WorkerError if a child dies.
        """
        api = self._order_api(Order("drain", why))
        number = self._handle_until(lambda: "drained" in api.reported, signals, time.monotonic() + timeout)
        self._is_hurried = number is not None

    def check(self) -> None:
        """Read what has been reported. Raises WorkerError, with the cause, if a child has died or failed, or a rank is stopped.

        To be called at least every LOOK_S while something is waited for, and when a worker is readable.
        """
        self._handle_events(None, 0)
        self._look_for_stopped()

    def reported_by(self, name: str, kind: ReportKind) -> str:
        """The text of the last report of this kind by the child `name`, which has made one."""
        return next(worker for worker in self._workers if worker.name == name).reported[kind]

    def stop(self, why: str, signals: Signals | None = None) -> None:
        """End pending requests with the error `why`, then all processes. A further signal cuts the waiting short."""
        if self._api is not None and "ready" in self._api.reported:
            self._api.order(Order("close", why))
            self._wait_for([self._api], HURRIED_S if self._is_hurried else LAST_WORDS_S, signals)
            self._is_hurried |= self._api.wait(0) is None  # stopped, say: what it took too long is taken off the others' time
        try:
            for worker in self._workers:
                worker.let_go()
            self._wait_for(self._workers, HURRIED_S if self._is_hurried else LEAVE_S, signals)
        finally:
            for worker in self._workers:
                worker.strike()
            deadline = time.monotonic() + KILLED_S
            for worker in self._workers:
                worker.kill(deadline - time.monotonic())

    def _order_api(self, order: Order) -> Worker:
        assert self._api is not None
        self._api.order(order)
        return self._api

    def _handle_until(self, is_done: Callable[[], bool], signals: Signals | None, deadline: float | None = None) -> int | None:
        """Handle events until `is_done`, the deadline, or a signal, whose number is returned."""
        number = None
        while number is None and not is_done():
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                break
            number = self._handle_events(signals, LOOK_S if timeout is None else min(timeout, LOOK_S))
            self._look_for_stopped()
        return number

    def _handle_events(self, signals: Signals | None, timeout: float | None) -> int | None:
        """Wait for something to happen; the number of a signal if that is what happened."""
        with selectors.DefaultSelector() as selector:
            if signals is not None:
                selector.register(signals, selectors.EVENT_READ)
            for worker in self._workers:
                selector.register(worker, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(timeout)]
        if signals is not None and signals in ready:
            return signals.take()
        heard = [(worker, worker.read_reports()) for worker in self._workers if worker in ready]
        self._raise_causes(heard)
        for worker, reports in heard:
            for report in reports or ():
                if report.kind == "failed":
                    self._look_for_cause(worker)
                    self.failed = f"the {worker.name} process"
                    raise WorkerError(f"{self.failed} failed: {report.text}")
                if report.kind in ("stage", "ready"):
                    self._on_stage(f"{worker.name}: {report.text or report.kind}")
        return None

    def _raise_causes(self, heard: Sequence[tuple[Worker, list[Report] | None]]) -> None:
        """Raise WorkerError for what makes other children fail: ranks that differ, before all else, and dead ones."""
        for worker, reports in heard:
            for report in reports or ():
                if report.kind == "diverged":
                    self.failed = f"the {worker.name} process"
                    raise WorkerError(f"the ranks do not agree any more: {self._explain(report)}")
        for worker, reports in heard:
            if reports is None:
                self.failed = f"the {worker.name} process"
                raise WorkerError(f"{self.failed} (pid {worker.pid}) died: {describe_exit(worker.wait(LEAVE_S))}{self._doing(worker)}")

    def _look_for_cause(self, failed: Worker) -> None:
        """A rank that fails may do so because another one has died, whose pipe ends a moment later than its sockets."""
        others = [rank for rank in self._ranks if rank is not failed and failed in self._ranks and "failed" not in rank.reported]
        deadline = time.monotonic() + CAUSE_S
        while others and (left := deadline - time.monotonic()) > 0:
            with selectors.DefaultSelector() as selector:
                for rank in others:
                    selector.register(rank, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select(left)]
            self._raise_causes([(rank, rank.read_reports()) for rank in others if rank in ready])
            others = [rank for rank in others if "failed" not in rank.reported]

    def _look_for_stopped(self) -> None:
        """Raise WorkerError if one of several ranks has been stopped for NUM_LOOKS looks."""
        now = time.monotonic()
        if len(self._ranks) < 2 or now - self._last_look < 0.99 * LOOK_S:  # a wait of LOOK_S may end a moment early
            return
        is_in_row = now - self._last_look < 2 * LOOK_S
        self._last_look = now
        for worker in self._ranks:
            worker.num_stopped = (worker.num_stopped if is_in_row else 0) + 1 if worker.is_stopped() else 0
            if worker.num_stopped >= NUM_LOOKS:
                self.failed = f"the {worker.name} process"
                doing = self._doing(worker)
                worker.end()  # it cannot go by itself
                raise WorkerError(f"{self.failed} (pid {worker.pid}) was stopped by a signal and did not go on for {NUM_LOOKS} s{doing}")

    def _doing(self, worker: Worker) -> str:
        """What a rank did when it ended, to be added to a sentence; nothing for another process."""
        if worker not in self._ranks or self._pulses is None:
            return ""
        if not any("ready" in rank.reported for rank in self._ranks):
            return ", while the ranks were starting"
        pulse = self._pulses.read()[self._workers.index(worker)]
        return f", in its step {pulse.num_steps}" if pulse.step_s else ", while it waited for a message"

    def _explain(self, report: Report) -> str:
        """What the rank that differs says, beside what rank 0 says if it can."""
        found = msgspec.json.decode(report.text, type=Divergence)
        primary = next(worker for worker in self._workers if worker.name == PRIMARY)
        primary.order(Order("steps"))
        deadline = time.monotonic() + STEPS_S
        while "steps" not in primary.reported and time.monotonic() < deadline:
            with selectors.DefaultSelector() as selector:
                selector.register(primary, selectors.EVENT_READ)
                if selector.select(deadline - time.monotonic()) and primary.read_reports() is None:
                    break
        return explain_divergence(self._suffix, found.step, found.field, found.rank)

    @staticmethod
    def _wait_for(workers: Sequence[Worker], timeout: float, signals: Signals | None) -> None:
        """Return when all have gone, the time is over or a signal has come."""
        deadline = time.monotonic() + timeout
        for worker in workers:
            while worker.wait(0.05) is None:
                if (signals is not None and signals.has_come()) or time.monotonic() > deadline:
                    return
