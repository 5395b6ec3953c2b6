"""The launcher: starts the API, tokenizer and scheduler processes, watches them, and ends them all together.

    1. find the model                         5. wait until each child is ready, or has failed with its cause
    2. open the port, claim the socket files  6. open the API's doors
    3. take the signals                       7. wait for a signal or a death; after SIGTERM, until running requests have ended
    4. start the children                     8. end pending requests with an error, end the children, remove the files

It computes nothing and serves nothing itself, so it is always there to clean up; if it is killed, the children see the end of the pipe
that it holds and go by themselves. Knows no model code and no messages. Called by the command line, in the main thread.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from minisgl.errors import ConfigError
from minisgl.models.resolve import resolve_model
from minisgl.processes.children import SCHEDULER_MODULE, Children, Program, rank_programs
from minisgl.processes.run_files import claim_run_files, remove_run_files
from minisgl.processes.signals import Signals, caught_signals
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.recording import refuse_recording
from minisgl.server.options import ServerOptions

__all__ = ["CHILD_MODULES", "serve"]

CHILD_MODULES: Mapping[str, str] = {
    "api": "minisgl.server.api_process",
    "tokenizer": "minisgl.server.tokenizer_process",
    "encoder": "minisgl.server.encoder_process",
    "scheduler": SCHEDULER_MODULE,
}
"""Kind of a child -> the module that it runs."""

BACKLOG = 2048
"""Connections that wait to be accepted."""

Say = Callable[[str], None]


def serve(options: ServerOptions, *, say: Say, child_modules: Mapping[str, str] = CHILD_MODULES) -> int:
    """Run a server until SIGINT or SIGTERM; returns 128 + the signal's number. `say` prints a line for whoever started it.

    Must be called in the main thread. Raises ConfigError if the port or the recording cannot be had or the model is not found,
    WorkerError with the cause if a child fails or dies: when this returns or raises, no process and no file of the server is left.
    """
    if options.scheduler.record is not None:
        refuse_recording(options.scheduler.record)
    model_dir = resolve_model(options.scheduler.model_path)
    config = dataclasses.replace(options.scheduler, model_path=str(model_dir))
    name = options.served_model_name or _model_name(options.scheduler.model_path)
    with _open_port(options) as listener, caught_signals() as signals:
        claim_run_files(config)
        for line in _describe(options, config, name):
            say(line)
        stages = _Stages(say)
        children = Children(stages.end)
        try:
            programs = _programs(config, options, name, child_modules)
            children.start(programs, config, step_timeout=options.step_timeout, listen_fd=listener.fileno())
            url = _url(listener)
            listener.close()  # the API has its own copy; ours would keep the port
            number = _run(children, signals, options, lambda: say(f"ready: {url}/v1"))
        except BaseException:
            children.stop(f"the server has broken down: {children.failed} has ended", signals)
            raise
        else:
            children.stop("the server is shutting down", signals)
        finally:
            remove_run_files(config)
    return 128 + number


def _programs(config: SchedulerConfig, options: ServerOptions, name: str, modules: Mapping[str, str]) -> list[Program]:
    """What is to be started; clients call the model `name`."""
    count = options.num_tokenizer
    return [
        Program("api", modules["api"], own={"model_name": name, "http": dataclasses.asdict(options.http)}, listens=True),
        Program("detokenizer" if count else "tokenizer", modules["tokenizer"], own={"num_tokenizer": count}),
        *(Program(f"tokenizer {number}", modules["encoder"], own={"number": number}) for number in range(1, count + 1)),
        *rank_programs(config.tp_info.size, modules["scheduler"]),
    ]


def _run(children: Children, signals: Signals, options: ServerOptions, on_ready: Callable[[], None]) -> int:
    """Wait until it serves, then until it need not any more; the number of the signal that said so. Raises WorkerError."""
    number = children.wait_until_ready(signals)
    if number is None:
        number = children.open_doors(signals)
    if number is None:
        on_ready()
        number = children.watch(signals)
        if number == signal.SIGTERM and options.drain_timeout > 0:
            children.drain("the server is shutting down", options.drain_timeout, signals)
    return number


class _Stages:
    """Says what was done how long after the start."""

    def __init__(self, say: Say) -> None:
        self._start = time.monotonic()
        self._say = say

    def end(self, stage: str) -> None:
        self._say(f"{time.monotonic() - self._start:6.2f} s  {stage}")


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


def _describe(options: ServerOptions, config: SchedulerConfig, model_name: str) -> list[str]:
    """The configuration, a line per setting."""
    hidden = {"scheduler", "served_model_name", "tp_info", "offline_mode", "backend_create_detokenizer_link", "raise_integrity_errors"}
    hidden |= {"http", "api_key"}
    values = [(field.name, getattr(each, field.name)) for each in (config, options, options.http) for field in dataclasses.fields(each)]
    lines = [f"minisgl serves {model_name}", f"  ranks = {config.tp_info.size}"]
    return lines + [f"  {name} = {value}" for name, value in values if name not in hidden]
