"""Turns "these rows, so many tokens each" into a step's plan, and notes on the table that the plan was launched.

Knows the table only. Called by the scheduler.

Letters: B rows, T new tokens, L prompt tokens that are scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.core import NO_INT32, Batch, Int32Array, Req, SlotSetup, make_batch
from minisgl.engine.base import StepHandle
from minisgl.scheduler.table import RequestTable, concat_ranges

__all__ = ["Launched", "Rows", "build_batch", "decode_rows", "note_launch", "prefill_rows"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Who takes part in a step."""

    uids: tuple[int, ...]
    """[B] ascending"""
    slots: Int32Array
    """[B]"""
    extend: Int32Array
    """[B] new tokens of each, >= 1"""
    is_sampled: npt.NDArray[np.bool_]
    """[B] True where the row's last known token is among them, so that its next token is sampled"""
    is_decode: bool
    """True if each computes the token that it sampled last"""
    wants_logprobs: bool
    """True if a row that samples wants log probabilities of its token"""

    @property
    def sampled_slots(self) -> Int32Array:
        return self.slots if self.is_decode else self.slots[self.is_sampled]


def decode_rows(table: RequestTable, slots: Int32Array) -> Rows:
    """One token for each of `slots`, which are in the order of their uids."""
    ones = np.ones(len(slots), dtype=np.int32)
    uids = tuple(table.uids[slots].tolist())
    return Rows(uids, slots, ones, ones.astype(np.bool_), True, bool(table.wants_logprobs[slots].any()))


def prefill_rows(table: RequestTable, chunks: list[tuple[Req, int]]) -> Rows:
    """So many tokens of each request's prompt; in the order of the uids."""
    slots = np.array([req.slot for req, _ in chunks], dtype=np.int32)
    extend = np.array([num_tokens for _, num_tokens in chunks], dtype=np.int32)
    is_sampled = np.array([num_tokens == req.extend_len for req, num_tokens in chunks])
    wants_logprobs = bool(table.wants_logprobs[slots[is_sampled]].any())
    return Rows(tuple(req.uid for req, _ in chunks), slots, extend, is_sampled, False, wants_logprobs)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight."""

    batch: Batch
    rows: Rows
    handle: StepHandle

    @property
    def has_logprobs(self) -> bool:
        """A request of the step wants log probabilities."""
        return self.rows.wants_logprobs or len(self.batch.prompt_targets) > 0


def build_batch(step: int, table: RequestTable, rows: Rows, model_end_ids: frozenset[int]) -> Batch:
    """The plan of `rows`; their pages have been allocated."""
    slots = owners = rows.slots
    positions = cached = table.cached[slots]
    if not rows.is_decode:
        positions, owners = concat_ranges(cached, rows.extend), slots.repeat(rows.extend)
    is_known = positions < table.host[owners]
    arrays: dict[str, npt.NDArray[np.integer]] = {
        "slots": slots,
        "cached_lens": cached,
        "extend_lens": rows.extend,
        "input_ids": np.where(is_known, table.tokens[owners, positions], -1),
        "positions": positions,
        "write_slots": table.write_slots(owners, positions),
        "sample_rows": rows.is_sampled.nonzero()[0],
        "table_updates": table.take_updates(slots),
    }
    if rows.is_decode:  # whoever decodes has sampled before, so the engine has its setup, and its prompt is done
        return make_batch(step, rows.uids, arrays)
    arrays["prompt_targets"] = _prompt_targets(table, rows, cached)
    return make_batch(step, rows.uids, arrays, _set_up(table, rows, model_end_ids))


def _prompt_targets(table: RequestTable, rows: Rows, cached: Int32Array) -> Int32Array:
    """[L, 3] for the rows that want log probabilities of their prompts: each of the step's tokens that has a successor in the prompt."""
    found = []
    starts = np.cumsum(rows.extend) - rows.extend
    for row in np.flatnonzero(table.is_scored[rows.slots]).tolist():
        req = table.reqs[rows.slots[row]]
        assert req is not None
        first, end = max(req.num_scored, int(cached[row])), min(int(cached[row] + rows.extend[row]), req.num_prompt_tokens - 1)
        if first < end:
            positions = np.arange(first, end, dtype=np.int32)
            num_top = np.full(len(positions), req.sampling_params.prompt_logprobs, dtype=np.int32)
            found.append(np.stack((starts[row] + positions - cached[row], req.tokens[first + 1 : end + 1], num_top), axis=1))
            req.num_scored = end
    return np.concatenate(found).astype(np.int32) if found else NO_INT32


def _set_up(table: RequestTable, rows: Rows, model_end_ids: frozenset[int]) -> tuple[SlotSetup, ...]:
    """Sampling state of the slots that sample for the first time since their request took them."""
    reqs = [table.reqs[slot] for slot in rows.sampled_slots.tolist()]
    return tuple(_slot_setup(req, model_end_ids) for req in reqs if req is not None)


def _slot_setup(req: Req, model_end_ids: frozenset[int]) -> SlotSetup:
    params = req.sampling_params
    seed = req.uid if params.seed is None else params.seed
    end_ids = req.end_ids if params.ignore_eos else req.end_ids | model_end_ids
    prompt, output = np.split(req.tokens[: req.host_len].copy(), [req.num_prompt_tokens])
    return SlotSetup(req.slot, params, seed % 2**64, end_ids, prompt, output)


def note_launch(table: RequestTable, rows: Rows, step: int) -> None:
    """Move the lengths on: the tokens will be in pages, the sampled ones known to the device."""
    table.cached[rows.slots] += rows.extend
    table.device[rows.slots] += rows.is_sampled
    table.last_step[rows.slots] = step
