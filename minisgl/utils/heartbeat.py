"""Signs of life: each worker writes the time of its last beat into shared memory, whoever watches reads it without asking the worker.

    a worker's four int64    last beat (ns), start of the step that runs (ns, 0: none), steps begun, longest step allowed (ns, 0: any)

The memory is a file without a name that the launcher makes and its children inherit: nothing is left to be removed. All times are those
of the system's monotonic clock, the same in all processes. Knows no process by name and no message. Used by the server's processes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass

__all__ = ["BEAT_S", "SILENCE_S", "Heart", "Pulse", "PulseReader", "make_heartbeat_file"]

BEAT_S = 1.0
"""Seconds between two beats."""
SILENCE_S = 4.0
"""A worker that has not beaten for longer is stopped or dead."""
NUM_WORDS, WORD_BYTES = 4, 8


def make_heartbeat_file(num_workers: int) -> int:
    """The descriptor of zero-filled shared memory for so many workers; the caller closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("minisgl-heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_workers * NUM_WORDS * WORD_BYTES)
    return descriptor


def _words(descriptor: int) -> memoryview:
    # Aligned words of 8 bytes are read and written whole.
    return memoryview(mmap.mmap(descriptor, 0)).cast("q")


class Heart:
    """The worker's own side. Steps belong to the thread that computes, beats to a thread that sleeps in between."""

    def __init__(self, descriptor: int, index: int) -> None:
        """`index`: this worker's place in the memory behind `descriptor`, which may be closed afterwards."""
        self._words = _words(descriptor)[index * NUM_WORDS : (index + 1) * NUM_WORDS]

    def start(self) -> None:
        """Beat from now on, until the process ends."""
        self._beat()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def set_step_timeout(self, seconds: float) -> None:
        """A step that takes longer is stuck. To be called before the first step."""
        self._words[3] = int(seconds * 1e9)

    def begin_step(self) -> None:
        """A step begins now; the one before it, if it has not ended yet, ends."""
        self._words[2] += 1
        self._words[1] = time.monotonic_ns()

    def end_step(self) -> None:
        """No step runs: what comes next may take its time."""
        self._words[1] = 0

    def _beat(self) -> None:
        self._words[0] = time.monotonic_ns()

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._beat()


@dataclass(frozen=True, slots=True)
class Pulse:
    """One worker as it was found."""

    silence_s: float
    """seconds since its last beat; infinite if it has not beaten yet"""
    step_s: float
    """seconds since its step began; 0 if none runs"""
    num_steps: int
    """steps begun since its start"""
    step_timeout_s: float

    @property
    def is_silent(self) -> bool:
        return self.silence_s > SILENCE_S

    @property
    def is_stuck(self) -> bool:
        return self.step_s > self.step_timeout_s > 0


class PulseReader:
    """The watching side."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: the memory; it may be closed afterwards."""
        self._words = _words(descriptor)

    def read(self) -> list[Pulse]:
        """All workers, in the order of their places."""
        words, now = self._words.tolist(), time.monotonic_ns()
        pulses = []
        for place in range(0, len(words), NUM_WORDS):
            beat, begun, num_steps, timeout = words[place : place + NUM_WORDS]
            silence = (now - beat) / 1e9 if beat else float("inf")
            pulses.append(Pulse(silence, (now - begun) / 1e9 if begun else 0.0, num_steps, timeout / 1e9))
        return pulses
