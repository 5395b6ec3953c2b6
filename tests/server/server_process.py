"""A whole server as processes, for tests that start and end it: its address, its children, what it leaves behind.

Only processes that were started here are ever signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from minisgl.utils import run_directory
from tests.tokenizer.fakes import byte_level

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
END_S = 10.0
"""A server is gone within so many seconds of whatever ends it."""


def write_byte_model(directory: Path) -> Path:
    """A model directory that has a tokenizer and a chat template, and no weights."""
    directory.mkdir(exist_ok=True)
    byte_level().save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    (directory / "config.json").write_text("{}")
    return directory


def memory_bytes(pid: int) -> int:
    """What a process holds in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition: Callable[[], bool], timeout: float = END_S) -> bool:
    """Poll; whether it became true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


def is_running(pid: int) -> bool:
    """A zombie, which only its parent can remove, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class ServerProcess:
    """A launcher and its children."""

    def __init__(self, process: subprocess.Popen[str], suffix: str) -> None:
        self.process = process
        self.suffix = suffix
        self.lines: queue.Queue[str] = queue.Queue()
        self.errors: list[str] = []
        self.said: list[str] = []
        """what it has said before it was ready"""
        self.url = ""
        self.children: dict[str, int] = {}
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, self.lines.put), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, self.errors.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream, take) -> None:
        for line in stream:
            take(line.rstrip("\n"))

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.url:
            line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            self.said.append(line)
            if match := re.fullmatch(r"ready: (.*)/v1", line):
                self.url = match[1]
            elif match := re.fullmatch(r" *_unique_suffix = (.*)", line):
                self.suffix = match[1]
        self.find_children()
        assert {"api", "scheduler"} < set(self.children)

    def find_children(self) -> None:
        """Names, as the server calls them, and pids of the launcher's children, from their command lines and the order of their start."""
        pids = sorted(map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()))
        modules = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2].decode().rpartition(".")[2] for pid in pids]
        for place, (pid, module) in enumerate(zip(pids, modules, strict=True)):
            name, before = module.removesuffix("_process"), modules[:place]
            name = name.removeprefix("tallied_")
            if name == "encoder":
                name = f"tokenizer {1 + before.count(module)}"
            elif name == "tokenizer":
                name = "detokenizer" if "encoder_process" in modules else name
            elif name != "api":
                name = f"scheduler rank {before.count(module)}" if module in before else "scheduler"
            self.children[name] = pid

    def wait_for_exit(self, timeout: float = END_S) -> int:
        return self.process.wait(timeout)

    @property
    def stderr(self) -> str:
        self._readers[1].join(END_S)
        return "\n".join(self.errors)

    def sockets(self) -> list[str]:
        return [path.name for path in run_directory().glob(f"{self.suffix}.*")]

    def leaves_nothing_behind(self) -> bool:
        """No child and no socket file, within the time that a server may take to end."""
        return wait_until(lambda: not any(map(is_running, self.children.values())) and not self.sockets())

    def clean_up(self) -> None:
        """After the test, whatever its outcome: it is asked to end, and what is still there is ended."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        for pid in (self.process.pid, *self.children.values()):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(END_S)
        self.process.stdout.close()
        self.process.stderr.close()


@contextlib.contextmanager
def server_process(
    model_dir: Path, *, scheduler: str = "tests.server.fake_scheduler", options: dict | None = None, suffix: str = "", **environment: str
) -> Iterator[ServerProcess]:
    """Start `run_server.py` with these fields of ServerOptions, in a process group of its own. Not waited for."""
    suffix = suffix or f"test-{secrets.token_hex(4)}"
    words = ["tests.server.run_server", str(model_dir), suffix, scheduler, json.dumps(options or {})]
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "tally"
        with started(words, suffix, **{"TALLY": str(tally), **environment}) as server:
            yield server
            check_endings(server, tally)


def check_endings(server: ServerProcess, tally: Path) -> None:
    """No request has ended twice; and if the server still serves, all that were accepted end now that their clients have gone."""

    def read() -> dict:
        return json.loads(tally.read_text()) if tally.is_file() else {"wrong": [], "open": []}

    is_serving = server.url and server.process.poll() is None and all(map(is_running, server.children.values()))
    assert not is_serving or wait_until(lambda: read()["open"] == []), read()
    assert read()["wrong"] == []


@contextlib.contextmanager
def started(words: list[str], suffix: str = "", **environment: str) -> Iterator[ServerProcess]:
    """Start `python -m words`. Without a `suffix` it is read from what the server says of itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    server = ServerProcess(process, suffix)
    try:
        yield server
    finally:
        server.clean_up()
