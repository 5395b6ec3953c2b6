"""The processes of the load client: started together, told when to begin, stopped by Ctrl-C, ended whatever happens.

Knows neither HTTP nor figures. Called by `serve`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

import msgspec

from minisgl.bench.serve_client import FRAME, READY, START, Result
from minisgl.bench.serve_plan import Plan
from minisgl.errors import WorkerError

__all__ = ["run_plans"]

HEAD_START_S = 0.1
"""From the order to begin to the common start."""
STOP_S = 10.0
"""What a process gets to report after the order to stop."""


def run_plans(plans: Sequence[Plan]) -> tuple[list[Result], bool]:
    """(results, whether Ctrl-C came), a process for each plan. Raises WorkerError if one of them dies."""
    with _processes(len(plans)) as processes, ThreadPoolExecutor(len(plans)) as threads:
        try:
            _start(processes, plans)
            reads = [threads.submit(_read_all, process) for process in processes]
            is_interrupted = False
            try:
                wait(reads)
            except KeyboardInterrupt:
                is_interrupted = True
                _stop(processes)
                wait(reads, STOP_S)
        finally:
            _kill(processes)  # so that no thread waits for one
        answers = [read.result() for read in reads]
        if not all(answers):
            raise _death(processes[answers.index(b"")])
        return [msgspec.msgpack.decode(answer, type=Result) for answer in answers], is_interrupted


def _start(processes: Sequence[subprocess.Popen[bytes]], plans: Sequence[Plan]) -> None:
    """Hand out the plans; when all are ready, give the common start."""
    for process, plan in zip(processes, plans, strict=True):
        data = msgspec.msgpack.encode(plan)
        _send(process, FRAME.pack(len(data)) + data)
    for process in processes:
        assert process.stdout is not None
        if process.stdout.read(1) != READY:
            raise _death(process)
    start = START.pack(time.monotonic() + HEAD_START_S)
    for process in processes:
        _send(process, start)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(WorkerError):  # one that has ended has reported
            _send(process, b"s")


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()


@contextmanager
def _processes(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """In sessions of their own, so that Ctrl-C comes to us alone; none is left at the end."""
    command = [sys.executable, "-m", "minisgl.bench.serve_client"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True))
        yield processes
    finally:
        _kill(processes)
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    view = memoryview(data)
    try:
        while view:
            view = view[process.stdin.write(view) :]
    except BrokenPipeError:
        raise _death(process) from None


def _read_all(process: subprocess.Popen[bytes]) -> bytes:
    """Until the process has ended."""
    assert process.stdout is not None
    data = process.stdout.read()
    process.wait()
    return data if process.returncode == 0 else b""


def _death(process: subprocess.Popen[bytes]) -> WorkerError:
    process.kill()
    return WorkerError(f"a client process has ended with status {process.wait()}: what it has measured is lost")
