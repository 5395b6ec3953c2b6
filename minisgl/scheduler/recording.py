"""The file that `--record` writes and `minisgl replay` reads: what a scheduler heard and did. docs/recordings.md describes it.

    b"minisgl recording\\n"
    frames, each a length (4 bytes, little-endian) and so many bytes of msgpack: a Header, then any number of Heard and Handled, then End

A file without End breaks off: the server was killed, or its disk was full. Knows no engine, and of the scheduler only its settings.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, Union

import msgspec

from minisgl import __version__
from minisgl.engine.base import EngineLimits
from minisgl.errors import ConfigError
from minisgl.scheduler.agreement import HandledStep

__all__ = ["End", "Handled", "Header", "Heard", "Recorder", "Recording", "Schedule", "StepObserver", "refuse_recording"]

logger = logging.getLogger(__name__)

MAGIC = b"minisgl recording\n"
LENGTH = struct.Struct("<I")
VERSION = 1
"""Of the format, and of what the fields of a step mean."""


class StepObserver(Protocol):
    """Who is told what one scheduler hears and does."""

    def begin_turn(self) -> None:
        """A turn of the scheduler's loop begins."""

    def note_frames(self, frames: Iterable[bytes]) -> None:
        """These messages have been heard in this turn, as they came."""

    def note_step(self, handled: HandledStep) -> None:
        """A step's results have been handled in this turn."""

    def close(self) -> None:
        """Nothing more comes. A second call does nothing."""


class Schedule(msgspec.Struct, frozen=True):
    """Settings that decide schedules, defaults filled in."""

    cache_type: str
    reserve_tokens: int
    max_extend_tokens: int
    max_extend_tokens_beside_decode: int
    is_overlapped: bool


class Header(msgspec.Struct, frozen=True):
    """What stands before the first turn."""

    version: int
    minisgl: str
    """version of the program that wrote it"""
    num_ranks: int
    schedule: Schedule
    limits: EngineLimits


class Heard(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Messages heard in a turn, the bytes as they came; a turn without messages has no such frame."""

    turn: int
    """counted from 0"""
    frames: list[bytes]


class Handled(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A step whose results were handled in a turn; `fields` and `digests` as in HandledStep."""

    turn: int
    step: int
    digests: tuple[int, ...]
    fields: tuple[bytes, ...]


class End(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The server ended in good order."""

    num_turns: int


class _Version(msgspec.Struct):
    version: int


Record = Union[Heard, Handled, End]


def refuse_recording(path: str) -> None:
    """Raise ConfigError if a recording at `path` could not be begun: to be told before a model is loaded. Makes no file."""
    file = Path(path)
    if file.exists() or file.is_symlink():
        raise ConfigError(f"--record: {path} exists; name a new file, or remove it")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"--record: {path} cannot be made: {file.parent} is no directory, or not writable; name another file")


class Recorder:
    """Writes a recording. Each frame is handed to the system at once, so that nothing of it dies with the process."""

    def __init__(self, path: str, num_ranks: int, schedule: Schedule, limits: EngineLimits) -> None:
        """Make the file, readable for its owner alone. Raises ConfigError if it exists or cannot be made."""
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"--record: {path} cannot be made: {error.strerror}; name another file") from error
        self._path = path
        self._encode = msgspec.msgpack.Encoder().encode
        self._turn = -1
        self._is_open = True
        self._lock = threading.Lock()
        """`close` may be called by another thread"""
        self._write_all(MAGIC + self._frame(Header(VERSION, __version__, num_ranks, schedule, limits)))

    def begin_turn(self) -> None:
        self._turn += 1

    def note_frames(self, frames: Iterable[bytes]) -> None:
        heard = list(frames)
        if heard:
            self._write(Heard(self._turn, heard))

    def note_step(self, handled: HandledStep) -> None:
        self._write(Handled(self._turn, handled.step, handled.digests, handled.fields))

    def close(self) -> None:
        self._write(End(self._turn + 1), is_last=True)

    def _frame(self, record: Header | Record) -> bytes:
        data = self._encode(record)
        return LENGTH.pack(len(data)) + data

    def _write(self, record: Record, *, is_last: bool = False) -> None:
        with self._lock:
            if not self._is_open:
                return
            try:
                self._write_all(self._frame(record))
            except OSError as error:
                logger.error("recording to %s stops in turn %d: %s; the server goes on", self._path, self._turn, error.strerror)
                is_last = True
            if is_last:
                self._is_open = False
                os.close(self._descriptor)

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


class Recording:
    """A recording that is being read, from its beginning to its end. Raises ConfigError for bytes that are no frame."""

    def __init__(self, path: str | Path) -> None:
        """Read the header and the first record. Raises ConfigError if the file is no recording, or of a version that is not ours."""
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - `close` is ours
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; name a file that `minisgl serve --record` wrote") from error
        self._path = path
        self._decode = msgspec.msgpack.Decoder(Record).decode
        try:
            self.header = self._read_header()
            self.current: Record | None = None
            """the next record; None where the file breaks off"""
            self.advance()
        except BaseException:
            self.close()
            raise

    def advance(self) -> None:
        """Go on to the next record."""
        frame = self._read_frame()
        try:
            self.current = None if frame is None else self._decode(frame)
        except msgspec.MsgspecError as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_header(self) -> Header:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise ConfigError(f"{self._path} is no recording; name a file that `minisgl serve --record` wrote")
        frame = self._read_frame()
        if frame is None:
            raise ConfigError(f"{self._path} breaks off before its header ends; there is nothing to replay")
        try:
            version = msgspec.msgpack.decode(frame, type=_Version).version
            if version != VERSION:
                raise ConfigError(f"{self._path} has version {version} of the format, {VERSION} is read; use the minisgl that wrote it")
            return msgspec.msgpack.decode(frame, type=Header)
        except msgspec.MsgspecError as error:
            raise self._damaged(error) from error

    def _read_frame(self) -> bytes | None:
        """The next frame; None if the file ends before it does."""
        length = self._file.read(LENGTH.size)
        if len(length) < LENGTH.size:
            return None
        (num_bytes,) = LENGTH.unpack(length)
        frame = self._file.read(num_bytes)
        return frame if len(frame) == num_bytes else None

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self._path} is damaged before byte {self._file.tell()}: {error}; make a new recording")
