"""A program in a pseudo-terminal of its own, as a user has it: keys in, characters out, each wait with a deadline."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 40.0
CTRL_C, CTRL_D, ENTER, META_ENTER = "\x03", "\x04", "\r", "\x1b\r"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NEW_PROMPT = ">\b"
"""prompt_toolkit draws an empty line's blank by moving over it"""
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Makes standard input the controlling terminal, so that Ctrl-C is a signal, and becomes the program."""


class Terminal:
    """The side of the keyboard and the screen."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.raw = ""
        """all that was written, as it came"""
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_seen = 0
        """characters of `text` that an `expect` has passed"""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def paste(self, text: str) -> None:
        """As terminals do: marked, so that it is one key to the program."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def send(self, line: str) -> None:
        self.type(line + ENTER)

    @property
    def text(self) -> str:
        """All that was written, without escape sequences."""
        return ESCAPES.sub("", self.raw)

    def expect(self, text: str, timeout: float = WAIT_S) -> None:
        """Wait until `text` is written, after what was last expected; escape sequences do not count."""
        deadline = time.monotonic() + timeout
        while (place := self.text.find(text, self._num_seen)) < 0:
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"{text!r} did not come, but {self.text[self._num_seen :]!r}")
        self._num_seen = place + len(text)

    def expect_prompt(self) -> None:
        """Wait until a message can be typed."""
        self.expect(NEW_PROMPT)

    def wait_for_exit(self, timeout: float = WAIT_S) -> int:
        """The exit status; what is still written goes to `raw`."""
        deadline = time.monotonic() + timeout
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, timeout: float) -> bool:
        """Take what comes next; False if nothing comes in time, or nothing more at all."""
        if timeout <= 0 or not select.select([self._descriptor], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # Linux says so when the last process has closed its side
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)


@contextmanager
def terminal(words: list[str], **environment: str) -> Iterator[Terminal]:
    """Start `python words`; it is killed at the end if it is still there."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    settings = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONUTF8": "1", **environment}
    command = [sys.executable, "-c", TAKE_TERMINAL, *words]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **settings}, start_new_session=True, close_fds=True
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
