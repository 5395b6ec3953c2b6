"""The launcher: starts the API, tokenizer and scheduler processes, watches them, and ends them all together.

    1. find the model             5. wait until each child is ready, or has failed with its cause
    2. open the port              6. open the API's doors
    3. take the signals           7. wait for a signal or a death
    4. start the children         8. end pending requests with an error, end the children, remove the sockets

It computes nothing and serves nothing itself, so it is always there to clean up; if it is killed, the children see the end of the pipe
that it holds and go by themselves. Knows no model code and no messages. Called by the command line, in the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from minisgl.errors import ConfigError, WorkerError
from minisgl.models.resolve import resolve_model
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server.child import Order
from minisgl.server.options import ChildSetup, ServerOptions, remove_sockets, settings_of
from minisgl.server.workers import LAUNCHER_SIGNALS, Worker, describe_exit

__all__ = ["CHILD_MODULES", "serve"]

CHILD_MODULES: Mapping[str, str] = {
    "api": "minisgl.server.api_process",
    "tokenizer": "minisgl.server.tokenizer_process",
    "scheduler": "minisgl.server.scheduler_process",
}
"""Name of a child -> the module that it runs."""

LAST_WORDS_S = 4.0
"""How long the API may take to end pending requests; slightly more than it gives its clients."""
LEAVE_S = 2.0
"""How long the others may take to go by themselves."""
BACKLOG = 2048
"""Connections that wait to be accepted."""

Say = Callable[[str], None]


def serve(options: ServerOptions, *, say: Say, child_modules: Mapping[str, str] = CHILD_MODULES) -> int:
    """Run a server until SIGINT or SIGTERM; returns 128 + the signal's number. `say` prints a line for whoever started it.

    Must be called in the main thread. Raises ConfigError if the port cannot be had or the model is not found, WorkerError with the cause
    if a child fails or dies: when this returns or raises, no process and no socket of the server is left.
    """
    stages = _Stages()
    model_dir = resolve_model(options.scheduler.model_path)
    stages.end("model found")
    config = dataclasses.replace(options.scheduler, model_path=str(model_dir))
    with _open_port(options) as listener, _caught_signals() as signals:
        setup = ChildSetup(-1, listener.fileno(), _model_name(options.scheduler.model_path), settings_of(config))
        children = _Children(config)
        try:
            children.start(child_modules, setup)
            url = _url(listener)
            listener.close()  # the API has its own copy; ours would keep the port
            number = children.wait_until_ready(signals, stages)
            if number is None:
                number = children.open_doors(signals)
            if number is None:
                for line in (*_describe(config, setup.model_name), *stages.lines(), f"ready: {url}/v1"):
                    say(line)
                number = children.watch(signals)
        except BaseException:
            children.stop(f"the server has broken down: {children.failed} has ended", signals)
            raise
        children.stop("the server is shutting down", signals)
    return 128 + number


class _Children:
    """All children of one server, which live and die together."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._workers: dict[str, Worker] = {}
        self.failed = "a process"
        """which child ended the server"""

    def start(self, modules: Mapping[str, str], setup: ChildSetup) -> None:
        for name, module in modules.items():
            own = setup if name == "api" else msgspec.structs.replace(setup, listen_fd=-1)
            with _blocked_signals():
                self._workers[name] = Worker.start(name, module, own)

    def wait_until_ready(self, signals: _Signals, stages: _Stages) -> int | None:
        """Return None when all are ready, or the number of a signal that came first. Raises WorkerError with a failed one's cause."""
        return self._handle_until(lambda: all(worker.is_ready for worker in self._workers.values()), signals, stages)

    def open_doors(self, signals: _Signals) -> int | None:
        """Let requests in. Returns and raises as `wait_until_ready`."""
        api = self._workers["api"]
        api.order(Order("open"))
        return self._handle_until(lambda: api.is_open, signals, None)

    def watch(self, signals: _Signals) -> int:
        """Wait for a signal; returns its number. Raises WorkerError if a child dies."""
        number = self._handle_until(lambda: False, signals, None)
        assert number is not None
        return number

    def _handle_until(self, is_done: Callable[[], bool], signals: _Signals, stages: _Stages | None) -> int | None:
        """Handle events until `is_done` or a signal comes, whose number is returned."""
        number = None
        while number is None and not is_done():
            number = self._handle_events(signals, stages)
        return number

    def _handle_events(self, signals: _Signals, stages: _Stages | None) -> int | None:
        """Wait for something to happen; the number of a signal if that is what happened."""
        with selectors.DefaultSelector() as selector:
            selector.register(signals, selectors.EVENT_READ)
            for worker in self._workers.values():
                selector.register(worker, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select()]
        if signals in ready:
            return signals.take()
        for worker in self._workers.values():
            if worker in ready:
                self._read_reports(worker, stages)
        return None

    def _read_reports(self, worker: Worker, stages: _Stages | None) -> None:
        reports = worker.read_reports()
        if reports is None:
            self.failed = f"the {worker.name} process"
            raise WorkerError(f"{self.failed} (pid {worker.pid}) died: {describe_exit(worker.wait(LEAVE_S))}")
        for report in reports:
            if report.kind == "failed":
                self.failed = f"the {worker.name} process"
                raise WorkerError(f"{self.failed} failed: {report.text}")
            worker.is_ready = True
            worker.is_open = report.kind == "open"
            if stages is not None:
                stages.end(f"{worker.name} ready" + (f" ({report.text})" if report.text else ""))

    def stop(self, why: str, signals: _Signals) -> None:
        """End pending requests with the error `why`, then all processes, then the sockets. A further signal cuts the waiting short."""
        api = self._workers.get("api")
        if api is not None and api.is_ready:
            api.order(Order("close", why))
            self._wait_for([api], LAST_WORDS_S, signals)
        for worker in self._workers.values():
            worker.let_go()
        self._wait_for(list(self._workers.values()), LEAVE_S, signals)
        for worker in self._workers.values():
            worker.kill()
        remove_sockets(self._config)

    @staticmethod
    def _wait_for(workers: list[Worker], timeout: float, signals: _Signals) -> None:
        """Return when all have gone, the time is over or a signal has come."""
        deadline = time.monotonic() + timeout
        for worker in workers:
            while worker.wait(0.05) is None:
                if signals.has_come() or time.monotonic() > deadline:
                    return


class _Signals:
    """Signals as a file: readable when one has come."""

    def __init__(self, read_fd: int) -> None:
        self._read_fd = read_fd

    def fileno(self) -> int:
        return self._read_fd

    def take(self) -> int:
        """The number of the next one; waits for it."""
        return os.read(self._read_fd, 1)[0]

    def has_come(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            return bool(selector.select(0))


@contextlib.contextmanager
def _caught_signals() -> Iterator[_Signals]:
    """Inside, SIGINT and SIGTERM only make the yielded object readable."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    old_handlers = {number: signal.signal(number, lambda *_: None) for number in LAUNCHER_SIGNALS}
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        yield _Signals(read_fd)
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait, and a child that is started is born with them blocked."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


class _Stages:
    """What took how long since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._ends: list[tuple[float, str]] = []

    def end(self, stage: str) -> None:
        self._ends.append((time.monotonic() - self._start, stage))

    def lines(self) -> list[str]:
        return [f"{seconds:6.2f} s  {stage}" for seconds, stage in self._ends]


def _open_port(options: ServerOptions) -> socket.socket:
    """The listening socket. Clients may connect from now on; they are answered once the API runs."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror or error}; choose another with --host and --port"
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _model_name(model: str | None) -> str:
    """What clients call the model: a hub id as it is, of a path only the last part, for paths are nobody's business."""
    if model is None:
        return "SmolLM2-135M-Instruct"
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def _describe(config: SchedulerConfig, model_name: str) -> list[str]:
    """The effective configuration, a line per setting."""
    hidden = {"tp_info", "offline_mode", "backend_create_detokenizer_link"}
    lines = [f"minisgl serves {model_name}"]
    lines += [f"  {field.name} = {getattr(config, field.name)}" for field in dataclasses.fields(config) if field.name not in hidden]
    return lines
