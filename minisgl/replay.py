"""Runs a recording again: the scheduler and its caches alone, without model and GPU, must come to every digest that was recorded.

The recorded messages arrive in the recorded turns, and the engine's place is taken by the recorded tokens. Knows the format and the
scheduler, no process and no terminal. Called by the command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minisgl.core import Batch, Int32Array, TokenLogprobs
from minisgl.engine.base import EngineLimits, StepLogprobs
from minisgl.errors import ConfigError, IntegrityError, MinisglError
from minisgl.message import BaseBackendMsg, BaseTokenizerMsg
from minisgl.scheduler.agreement import FIELDS, HandledStep, plain, show_values
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.recording import End, Handled, Header, Heard, Recording
from minisgl.scheduler.scheduler import Scheduler
from minisgl.utils import decode_or_drop

__all__ = ["Difference", "Replay", "replay"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that was not as recorded."""

    step: int
    field: str
    """one of FIELDS, or "step": another step, or none, was handled then"""
    text: str
    """both values"""


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a replay."""

    num_ranks: int
    """of the server that was recorded"""
    num_turns: int
    num_steps: int
    """whose digests were all reproduced"""
    is_complete: bool
    """False: the recording breaks off, as it does when a server is killed"""
    difference: Difference | None


def replay(path: str | Path) -> Replay:
    """Run the recording at `path` up to its end or its first difference. Raises ConfigError if it is none that can be read here."""
    recording = Recording(path)
    try:
        script = _Script(recording)
        scheduler = _ReplayScheduler(recording.header, script)
        difference = None
        try:
            scheduler.run_forever()
        except _Over:
            pass
        except _Differs as differs:
            difference = differs.difference
        except IntegrityError as error:
            difference = Difference(script.num_steps, "step", f"the replay breaks off: {error}")
        return Replay(recording.header.num_ranks, script.turn + 1, script.num_steps, isinstance(recording.current, End), difference)
    finally:
        recording.close()


class _Over(MinisglError):
    """The recording ends here."""


class _Differs(MinisglError):
    def __init__(self, step: int, field: str, text: str) -> None:
        super().__init__(text)
        self.difference = Difference(step, field, text)


class _Script:
    """The recording as it is acted out: supplies messages and tokens, and observes what the scheduler makes of them."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.turn = -1
        self.num_steps = 0

    def begin_turn(self) -> None:
        record = self._recording.current
        if isinstance(record, Handled) and record.turn <= self.turn:
            raise _Differs(record.step, "step", f"handled in turn {self.turn} when recorded, none in the replay")
        if record is None or (isinstance(record, End) and record.num_turns == self.turn + 1):
            raise _Over
        self.turn += 1

    def messages(self) -> list[BaseBackendMsg]:
        """What was heard in this turn."""
        messages = []
        while isinstance(record := self._recording.current, Heard) and record.turn == self.turn:
            decoded = [decode_or_drop(BaseBackendMsg.decoder, frame) for frame in record.frames]
            messages += [message for message in decoded if message is not None]
            self._recording.advance()
        return messages

    def tokens(self, batch: Batch) -> Int32Array:
        """What was sampled in the step that is handled now; filled up if other rows sample, which `note_step` will tell."""
        recorded = self._handled(batch.step)
        tokens = np.frombuffer(recorded.fields[FIELDS.index("tokens")], dtype="<i4")
        filled = np.zeros(len(batch.sample_rows), dtype=np.int32)
        filled[: len(tokens)] = tokens[: len(filled)]
        return filled

    def note_frames(self, frames: Iterable[bytes]) -> None:
        """They come from here."""

    def note_step(self, handled: HandledStep) -> None:
        """Compare it with the recorded one."""
        recorded = self._handled(handled.step)
        if recorded.step != handled.step:
            raise _Differs(recorded.step, "step", f"step {recorded.step} when recorded, step {handled.step} in the replay")
        for field, digests in zip(FIELDS, zip(recorded.digests, handled.digests, strict=True), strict=True):
            if digests[0] != digests[1]:
                values = (plain(field, step.fields[FIELDS.index(field)]) for step in (recorded, handled))
                raise _Differs(handled.step, field, show_values("recorded", next(values), "replayed", next(values)))
        self._recording.advance()
        self.num_steps += 1

    def close(self) -> None:
        """The file is closed by whoever opened it."""

    def _handled(self, step: int) -> Handled:
        """The recorded step of this turn, for the replay's `step`."""
        record = self._recording.current
        if record is None or isinstance(record, End):
            raise _Over
        if isinstance(record, Heard) or record.turn != self.turn:
            raise _Differs(step, "step", f"none handled in turn {self.turn} when recorded, step {step} in the replay")
        return record


@dataclass(frozen=True, slots=True)
class _Step:
    """A step whose tokens are known."""

    batch: Batch
    script: _Script

    def read(self) -> Int32Array:
        return self.script.tokens(self.batch)

    def read_logprobs(self) -> StepLogprobs:
        """None was recorded: they decide nothing."""
        unknown = TokenLogprobs(-1, None)
        return StepLogprobs((unknown,) * len(self.batch.sample_rows), (unknown,) * len(self.batch.prompt_targets))


class _ReplayEngine:
    """Takes every plan and computes none."""

    def __init__(self, limits: EngineLimits, script: _Script) -> None:
        self.limits = limits
        self.cpu_group = None
        self._script = script

    def submit(self, batch: Batch) -> _Step:
        return _Step(batch, self._script)

    def close(self) -> None:
        """There is nothing to give back."""


class _ReplayScheduler(Scheduler):
    """The scheduler, both ends in the script's hand."""

    def __init__(self, header: Header, script: _Script) -> None:
        """Raises ConfigError if the environment forces another schedule than the recorded one."""
        schedule = header.schedule
        self._script = script
        config = SchedulerConfig(
            model_path="unused",
            offline_mode=True,
            cache_type=schedule.cache_type,
            reserve_tokens=schedule.reserve_tokens,
            max_extend_tokens=schedule.max_extend_tokens,
            max_extend_tokens_beside_decode=schedule.max_extend_tokens_beside_decode,
            overlap=schedule.is_overlapped,
        )
        super().__init__(config, _ReplayEngine(header.limits, script), observer=script)
        if self.is_overlapped != schedule.is_overlapped:
            raise ConfigError("MINISGL_DISABLE_OVERLAP_SCHEDULING is set, and the recorded scheduler overlapped steps; unset it")

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:  # noqa: ARG002 - what comes when is written down
        return self._script.messages()

    def offline_send_result(self, reply: BaseTokenizerMsg) -> None:
        """Nobody listens."""
