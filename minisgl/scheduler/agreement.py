"""Whether the ranks still keep one ledger: what a handled step was, a digest per field of it, and how two ranks are compared.

Rank 0's digests travel with the count of messages that it announces anyway; every other rank compares them with its own. The last steps
are kept in plain, so that a difference can be shown and not only stated. Knows pages and plans, no device, queue or process. Called by
the scheduler, the launcher and whoever records.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from minisgl.core import Batch, Int32Array
from minisgl.errors import IntegrityError
from minisgl.kvcache import PageAllocator
from minisgl.utils.run_dir import make_private_directory, run_directory

__all__ = [
    "FIELDS",
    "NO_DIGESTS",
    "DivergedError",
    "HandledStep",
    "StepLog",
    "TracedAllocator",
    "explain_divergence",
    "first_difference",
    "plain",
    "show_values",
    "steps_path",
]

FIELDS = ("uids", "lengths", "inputs", "pages_taken", "pages_freed", "page_table", "tokens")
"""What is compared of a step, in this order. Each is a list of integers, int64 for uids and int32 otherwise:

uids of the rows; cached lengths of all rows, then new tokens of all rows; token ids that go in (-1: sampled by the step before);
pages taken and pages given back since the step before; (row, column, page) written to the page table; sampled tokens."""
NO_DIGESTS = (-1, *(0 for _ in FIELDS))
"""In place of a step's number and digests, where none has been handled."""
NO_DIGEST = bytes(8)
NUM_KEPT = 16
"""Steps kept in plain."""
MAX_SHOWN = 16
"""Values of a field in a message."""


class DivergedError(IntegrityError):
    """This rank has handled a step otherwise than rank 0 has. `field` is one of FIELDS, "step" or "waiting"."""

    def __init__(self, step: int, field: str, rank: int) -> None:
        super().__init__(f"rank {rank} differs from rank 0 at step {step} in: {field}")
        self.step, self.field, self.rank = step, field, rank


class HandledStep(NamedTuple):
    """One step whose results have been handled. `fields` and `digests` are in the order of FIELDS."""

    step: int
    fields: tuple[bytes, ...]
    """little-endian integers"""
    digests: tuple[int, ...]
    """64 bits, signed; 0 for an empty field"""

    def values(self) -> dict[str, list[int]]:
        """The fields in plain."""
        return {name: plain(name, data) for name, data in zip(FIELDS, self.fields, strict=True)}


class TracedAllocator(PageAllocator):
    """An allocator that remembers which pages went out and came back since it was last asked."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._taken: list[bytes] = []
        self._freed: list[bytes] = []

    def alloc(self, num_pages: int) -> Int32Array:
        pages = super().alloc(num_pages)
        self._taken.append(pages.tobytes())
        return pages

    def free(self, pages: Int32Array) -> None:
        super().free(pages)
        self._freed.append(pages.tobytes())

    def take_trace(self) -> tuple[bytes, bytes]:
        """(pages taken, pages given back), in order, since the last call."""
        if not self._taken and not self._freed:
            return b"", b""
        taken, freed = b"".join(self._taken), b"".join(self._freed)
        self._taken, self._freed = [], []
        return taken, freed


class StepLog:
    """The last steps that one rank has handled, and the comparison with rank 0's."""

    def __init__(self, allocator: TracedAllocator, rank: int) -> None:
        self._allocator = allocator
        self._rank = rank
        self._kept: deque[HandledStep] = deque(maxlen=NUM_KEPT)
        self._uids: tuple[int, ...] = ()
        self._packed_uids = b""
        self.digests: tuple[int, ...] = NO_DIGESTS
        """number and digests of the last step"""

    def note(self, batch: Batch, tokens: Int32Array) -> HandledStep:
        """The step `batch` has been handled; int32 `tokens` is what it sampled."""
        if batch.uids is not self._uids:  # while nobody comes or goes, it is the same tuple
            self._uids = batch.uids
            self._packed_uids = struct.pack(f"<{len(batch.uids)}q", *batch.uids)
        plan, layout = batch.buffer.tobytes(), batch.layout
        inputs, table = layout["input_ids"], layout["table_updates"]
        fields = (
            self._packed_uids,
            plan[4 * layout["cached_lens"][0] : 4 * layout["extend_lens"][1]],
            plan[4 * inputs[0] : 4 * inputs[1]],
            *self._allocator.take_trace(),
            plan[4 * table[0] : 4 * table[1]],
            tokens.tobytes(),
        )
        handled = HandledStep(batch.step, fields, digests_of(fields))
        self._kept.append(handled)
        self.digests = (batch.step, *handled.digests)
        return handled

    def check(self, theirs: Sequence[int]) -> None:
        """Compare rank 0's `digests` with ours. Raises DivergedError with the first that differs."""
        if tuple(theirs) != self.digests:
            place = next(place for place, pair in enumerate(zip(theirs, self.digests, strict=True)) if pair[0] != pair[1])
            raise DivergedError(int(theirs[0]), ("step", *FIELDS)[place], self._rank)

    def write(self, path: Path) -> None:
        """Write the steps that are kept, in plain, readable for their owner alone. May be called in any thread."""
        steps = [{"step": handled.step, **handled.values()} for handled in self._kept.copy()]
        make_private_directory(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode({"rank": self._rank, "steps": steps}))


def digests_of(fields: Sequence[bytes]) -> tuple[int, ...]:
    """For each field a number of 64 bits, signed, that stands for it on every machine; 0 for an empty one."""
    joined = b"".join([blake2b(data, digest_size=8).digest() if data else NO_DIGEST for data in fields])
    return struct.unpack(f"<{len(fields)}q", joined)


def plain(field: str, data: bytes) -> list[int]:
    """The integers of a field."""
    values: list[int] = np.frombuffer(data, dtype="<i8" if field == "uids" else "<i4").tolist()
    return values


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place where two lists differ; the shorter one's end if it is the other's beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))


def show_values(name_one: str, one: Sequence[int], name_other: str, other: Sequence[int]) -> str:
    """Both lists for a message, each behind its owner's name; long ones from shortly before the first place where they differ."""
    start = max(0, first_difference(one, other) - 2) if max(len(one), len(other)) > MAX_SHOWN else 0
    return f"{name_one} {_show(one, start)}, {name_other} {_show(other, start)}"


def _show(values: Sequence[int], start: int) -> str:
    shown = [*(["..."] if start else []), *map(str, values[start : start + MAX_SHOWN])]
    return f"[{', '.join([*shown, *(['...'] if len(values) > start + MAX_SHOWN else [])])}]"


def steps_path(suffix: str, rank: int) -> Path:
    """Where a rank of the server `suffix` writes its last steps when ranks differ. The file outlives the server, to be looked at."""
    return run_directory() / f"diverged-{suffix}.rank{rank}.json"


def explain_divergence(suffix: str, step: int, field: str, rank: int) -> str:
    """What rank 0 and `rank` say of a step that they differ in, from the files that they wrote, as far as they did."""
    if field == "waiting":
        found = f"rank 0 computes and rank {rank} waits for a message"
    else:
        ours, theirs = _read_value(suffix, 0, step, field), _read_value(suffix, rank, step, field)
        if ours is None or theirs is None:
            missing = 0 if ours is None else rank
            found = f"rank {missing} has not kept this step; rank {rank - missing} has {_show(theirs or ours or [], 0)}"
        else:
            found = show_values("rank 0 has", ours, f"rank {rank} has", theirs)
    where = " and ".join(str(path) for path in (steps_path(suffix, 0), steps_path(suffix, rank)) if path.exists())
    return f"rank {rank} differs from rank 0 at step {step} in: {field}; {found}; their last steps stand in {where or 'no file'}"


def _read_value(suffix: str, rank: int, step: int, field: str) -> list[int] | None:
    """What `rank` wrote of a step; of field "step", the last one that it has handled. None if it did not."""
    try:
        steps = msgspec.json.decode(steps_path(suffix, rank).read_bytes())["steps"]
    except (OSError, msgspec.DecodeError):
        return None
    if field == "step":
        return [handled["step"] for handled in steps][-1:]
    return next((handled[field] for handled in steps if handled["step"] == step), None)
