"""Programs that import torch, as forks of a process that has imported it already: one starts in milliseconds instead of seconds.

    python -m tests.tools.fork_server MODULE

imports MODULE, starts no thread, and forks for each line on its standard input, a JSON object with `words`, `stdin` (a FIFO) and `stderr`
(a file). The fork is as a program of its own that runs `MODULE.main(*words)` and then ends as every program does. Pids and exit statuses
are told on standard output. When its standard input ends it kills what is left.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0


class Fork:
    """One program: what a test needs of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, stdin: Path, stderr: Path) -> None:
        self._server, self._stderr = server, stderr
        self.pid = 0
        self.returncode: int | None = None
        self.stdin = os.fdopen(os.open(stdin, os.O_RDWR), "w", buffering=1)  # for reading too, so that this open waits for nobody

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        with self._server.news:
            if not self._server.news.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired(["fork", str(self.pid)], timeout)
        assert self.returncode is not None
        return self.returncode

    def errors(self) -> str:
        """What it has said on standard error so far."""
        return self._stderr.read_text()

    def kill(self) -> None:
        """End it, if it has not ended, and wait for that."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(START_S)
        self.stdin.close()


class ForkServer:
    """The process that forks, started when first needed."""

    def __init__(self, module: str, directory: Path, **environment: str) -> None:
        self._module, self._directory, self._environment = module, directory, environment
        self._process: subprocess.Popen[str] | None = None
        self._forks: list[Fork] = []
        self._numbers = itertools.count()
        self.news = threading.Condition()

    def start(self, *words: str) -> Fork:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.tools.fork_server", self._module],
                cwd=ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **self._environment},
                start_new_session=True,  # Ctrl-C is for the tests alone, which end what they have started
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            threading.Thread(target=self._listen, daemon=True).start()
        number = next(self._numbers)
        stdin, stderr = self._directory / f"{number}.stdin", self._directory / f"{number}.stderr"
        os.mkfifo(stdin)
        stderr.touch()
        fork = Fork(self, stdin, stderr)
        with self.news:
            self._forks.append(fork)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"words": words, "stdin": str(stdin), "stderr": str(stderr)}) + "\n")
        self._process.stdin.flush()
        with self.news:
            assert self.news.wait_for(lambda: fork.pid or fork.returncode is not None, START_S), f"{self._module} has not started"
            assert fork.pid, f"{self._module} has ended"
        return fork

    def _listen(self) -> None:
        """Take the server's word: the pid of the next fork, or that one has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, status = json.loads(line)
            with self.news:
                if status is None:
                    next(fork for fork in self._forks if not fork.pid).pid = pid
                else:
                    next(fork for fork in self._forks if fork.pid == pid and fork.returncode is None).returncode = status
                self.news.notify_all()
        with self.news:  # it has ended, and its forks with it
            for fork in self._forks:
                fork.returncode = -signal.SIGKILL if fork.returncode is None else fork.returncode
            self.news.notify_all()

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(START_S)
            self._process.stdout.close()


@contextlib.contextmanager
def fork_server(module: str, directory: Path, **environment: str) -> Iterator[ForkServer]:
    server = ForkServer(module, directory, **environment)
    try:
        yield server
    finally:
        server.close()


def tell(pid: int, status: int | None) -> None:
    os.write(1, f"{json.dumps([pid, status])}\n".encode())


def become(stdin: int, stderr: str) -> None:
    """Nothing of the server's pipes stays open in the fork."""
    os.set_blocking(stdin, True)
    others = os.open(os.devnull, os.O_WRONLY), os.open(stderr, os.O_WRONLY | os.O_APPEND)
    for descriptor, opened in enumerate((stdin, *others)):
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(os.dup(0))


def reap(children: set[int]) -> None:
    for child in sorted(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.discard(pid)
            tell(pid, os.waitstatus_to_exitcode(status))


def serve(module: str) -> None:
    main = importlib.import_module(module).main
    gc.freeze()  # a fork that ends would look at all that was imported
    children: set[int] = set()
    rest = b""
    while data := read(children):
        *lines, rest = (rest + data).split(b"\n")
        for request in map(json.loads, lines):
            assert len(os.listdir("/proc/self/task")) == 1, "a thread was started before a fork"
            stdin = os.open(request["stdin"], os.O_RDONLY | os.O_NONBLOCK)  # before the test hears of the fork, and may close its end
            child = os.fork()
            if child == 0:
                become(stdin, request["stderr"])
                main(*request["words"])
                return
            os.close(stdin)
            children.add(child)
            tell(child, None)
    for child in children:
        os.kill(child, signal.SIGKILL)


def read(children: set[int]) -> bytes:
    """What comes next on standard input, or nothing at its end; meanwhile forks that end are told of."""
    while not select.select([0], [], [], 0.02)[0]:
        reap(children)
    return os.read(0, 65536)


if __name__ == "__main__":
    serve(sys.argv[1])
