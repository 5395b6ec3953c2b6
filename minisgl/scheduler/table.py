"""Requests that hold a slot, as arrays: one row each, so that a step touches all of them with a few numpy calls.

Knows no prefix cache, no device and no messages. Owned by the scheduler.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minisgl.core import CACHED, DEVICE, HOST, MAX_DEVICE, NO_INT32, NUM_LENGTHS, Int32Array, Req
from minisgl.errors import IntegrityError

__all__ = ["RequestTable", "concat_ranges"]

IntArray = npt.NDArray[np.integer]


def concat_ranges(starts: IntArray, counts: IntArray) -> npt.NDArray[np.int64]:
    """[s0, s0+1, .. s0+c0-1, s1, ..]: ranges of `counts` numbers from `starts`, one after the other."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    numbers: npt.NDArray[np.int64] = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return numbers


class RequestTable:
    """`num_slots` rows for sequences of up to `max_seq_len` tokens in pages of `page_size` tokens."""

    def __init__(self, num_slots: int, max_seq_len: int, page_size: int) -> None:
        self.page_size = page_size
        max_pages = -(-max_seq_len // page_size)
        self._lengths = np.zeros((NUM_LENGTHS, num_slots), dtype=np.int32)
        self.cached, self.device, self.host, self.most = (self._lengths[i] for i in (CACHED, DEVICE, HOST, MAX_DEVICE))
        """each [slots]: the lengths of core.Req, in tokens"""
        self.tokens = np.zeros((num_slots, max_seq_len), dtype=np.int32)
        self.pages = np.zeros((num_slots, max_pages), dtype=np.int32)
        self.num_pages = np.zeros(num_slots, dtype=np.int32)
        """[slots] pages in the row, shared ones first"""
        self.uids = np.zeros(num_slots, dtype=np.int64)
        self.is_live = np.zeros(num_slots, dtype=np.bool_)
        """[slots] False once the request has finished: tokens that a launched step still samples for it are discarded"""
        self.last_step = np.full(num_slots, -1, dtype=np.int64)
        """[slots] the last launched step that touches the row"""
        self.ends_at_eos = np.zeros(num_slots, dtype=np.bool_)
        self.wants_logprobs = np.zeros(num_slots, dtype=np.bool_)
        """[slots] True if the request wants log probabilities of sampled tokens"""
        self.is_scored = np.zeros(num_slots, dtype=np.bool_)
        """[slots] True if it wants those of its prompt"""
        self.has_end_ids = np.zeros(num_slots, dtype=np.bool_)
        """[slots] True if the request has end ids of its own"""
        self.reqs: list[Req | None] = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._dirty = np.zeros((2, num_slots), dtype=np.int32)
        """[2, slots] first and one past the last column that the engine's page table does not have yet"""

    @property
    def num_slots(self) -> int:
        return len(self.reqs)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def live_reqs(self) -> list[Req]:
        """Requests that hold a slot, finished ones included, in the order of their slots."""
        return [req for req in self.reqs if req is not None]

    def take_slot(self, req: Req) -> None:
        """Give the request a row and make it show the row's numbers."""
        if req.slot >= 0 or not self._free_slots:
            raise IntegrityError(f"request {req.uid} has slot {req.slot}; {len(self._free_slots)} slots are free")
        slot = self._free_slots.pop()
        self._lengths[:, slot] = req.lengths
        self.tokens[slot, : req.host_len] = req.tokens[: req.host_len]
        req.lengths, req.tokens, req.slot = self._lengths[:, slot], self.tokens[slot], slot
        self.num_pages[slot] = 0
        self._dirty[:, slot] = 0
        self.last_step[slot] = -1
        self.wants_logprobs[slot] = req.sampling_params.logprobs is not None
        self.is_scored[slot] = req.sampling_params.prompt_logprobs is not None
        self.ends_at_eos[slot], self.has_end_ids[slot] = not req.sampling_params.ignore_eos, bool(req.end_ids)
        self.uids[slot], self.is_live[slot], self.reqs[slot] = req.uid, True, req

    def return_slot(self, req: Req) -> None:
        """Take the row back; the request keeps copies of its numbers."""
        slot = req.slot
        if slot < 0 or self.reqs[slot] is not req:
            raise IntegrityError(f"request {req.uid} returns slot {slot}, which it does not hold")
        req.lengths, req.tokens, req.slot = req.lengths.copy(), req.tokens[: req.host_len].copy(), -1
        self.is_live[slot], self.reqs[slot] = False, None
        self._free_slots.append(slot)

    def write_pages(self, slot: int, first: int, pages: Int32Array) -> None:
        """Put pages into the columns from `first` on; columns before `num_pages` are replaced, later ones appended."""
        end = first + len(pages)
        self.pages[slot, first:end] = pages
        self.num_pages[slot] = max(end, self.num_pages[slot])
        self._mark(slot, first, end)

    def append_pages(self, slots: IntArray, counts: IntArray, pages: Int32Array) -> None:
        """Append `counts` pages to each of `slots`, taking them from `pages` in order."""
        first = self.num_pages[slots]
        self.pages[np.repeat(slots, counts), concat_ranges(first, counts)] = pages
        end = first + counts.astype(np.int32)
        self.num_pages[slots] = end
        low, high = self._dirty[:, slots]
        self._dirty[0, slots] = np.where(low >= high, first, low)
        self._dirty[1, slots] = end

    def _mark(self, slot: int, first: int, end: int) -> None:
        low, high = self._dirty[:, slot].tolist()
        if end > first:
            self._dirty[:, slot] = (first, end) if low >= high else (min(low, first), max(high, end))

    def take_updates(self, slots: IntArray) -> Int32Array:
        """[U, 3] page-table writes (row, column, page) that the engine still needs for `slots`, or none; they count as done."""
        low, high = self._dirty[:, slots]
        is_dirty = high > low
        if not is_dirty.any():
            return NO_INT32
        slots, low, counts = slots[is_dirty], low[is_dirty], (high - low)[is_dirty]
        rows, columns = slots.repeat(counts), concat_ranges(low, counts)
        self._dirty[:, slots] = 0
        return np.stack((rows, columns, self.pages[rows, columns]), axis=1).astype(np.int32)

    def num_pages_needed(self, slots: IntArray, lengths: IntArray) -> npt.NDArray[np.int64]:
        """[len(slots)] pages missing for sequences of `lengths` tokens, >= 0."""
        wanted = -(-lengths.astype(np.int64) // self.page_size)
        missing: npt.NDArray[np.int64] = np.maximum(wanted - self.num_pages[slots], 0)
        return missing

    def is_short(self, slots: IntArray) -> npt.NDArray[np.bool_]:
        """[len(slots)] True where the row has no page for the last token that the device knows."""
        short: npt.NDArray[np.bool_] = self.device[slots] > self.num_pages[slots] * self.page_size
        return short

    def write_slots(self, slots: IntArray, positions: IntArray) -> Int32Array:
        """page * page_size + offset of each (slot, position)."""
        columns, offsets = np.divmod(positions, self.page_size)
        places: Int32Array = self.pages[slots, columns] * self.page_size + offsets
        return places

    def check_lengths(self) -> None:
        """Raise IntegrityError unless every live row satisfies the invariant of core.Req."""
        for req in self.live_reqs():
            cached, device, host, most = (int(req.lengths[i]) for i in (CACHED, DEVICE, HOST, MAX_DEVICE))
            is_right = 0 <= cached < device <= most and 0 < host <= device <= host + 1
            if self.is_live[req.slot] and not is_right:
                raise IntegrityError(f"request {req.uid}: cached {cached}, device {device}, host {host}, max {most} tokens")
