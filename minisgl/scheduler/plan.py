"""Turns "these rows, so many tokens each" into a step's plan, and notes on the table that the plan was launched.

Knows the table only. Called by the scheduler.

Letters: B rows, T new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.core import CACHED, DEVICE, HOST, NO_INT32, Batch, Int32Array, Req, SlotSetup, make_batch
from minisgl.engine.base import StepHandle
from minisgl.scheduler.table import RequestTable, concat_ranges

__all__ = ["Launched", "Rows", "build_batch", "note_launch"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Who takes part in a step."""

    slots: Int32Array
    """[B] in the order of their uids"""
    extend: Int32Array
    """[B] new tokens of each, >= 1"""
    is_sampled: npt.NDArray[np.bool_]
    """[B] True where the row's last known token is among them, so that its next token is sampled"""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight."""

    batch: Batch
    rows: Rows
    cached_after: Int32Array
    """[B] tokens in pages once the step is done"""
    handle: StepHandle
    has_logprobs: bool
    """A request of the step wants log probabilities."""


def build_batch(step: int, table: RequestTable, rows: Rows, model_end_ids: frozenset[int]) -> Batch:
    """The plan of `rows`; their pages have been allocated."""
    slots, extend = rows.slots, rows.extend
    cached = table.column(slots, CACHED)
    is_decode = int(extend.sum()) == len(slots)
    positions = cached if is_decode else concat_ranges(cached, extend)
    owners = slots if is_decode else np.repeat(slots, extend)
    is_known = positions < table.lengths[owners, HOST]
    arrays = {
        "slots": slots,
        "cached_lens": cached,
        "extend_lens": extend,
        "input_ids": np.where(is_known, table.tokens[owners, positions], -1),
        "positions": positions,
        "write_slots": table.write_slots(owners, positions),
        "sample_rows": np.flatnonzero(rows.is_sampled),
        "table_updates": table.take_updates(slots),
        "prompt_targets": _prompt_targets(table, rows, cached),
    }
    return make_batch(step, tuple(table.uids[slots].tolist()), arrays, _set_up(table, rows, model_end_ids))


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
    slots = rows.slots[rows.is_sampled & ~table.is_set_up[rows.slots]]
    if not len(slots):
        return ()
    table.is_set_up[slots] = True
    return tuple(_slot_setup(req, model_end_ids) for req in (table.reqs[slot] for slot in slots) if req is not None)


def _slot_setup(req: Req, model_end_ids: frozenset[int]) -> SlotSetup:
    params = req.sampling_params
    seed = req.uid if params.seed is None else params.seed
    end_ids = req.end_ids if params.ignore_eos else req.end_ids | model_end_ids
    prompt, output = np.split(req.tokens[: req.host_len].copy(), [req.num_prompt_tokens])
    return SlotSetup(req.slot, params, seed % 2**64, end_ids, prompt, output)


def note_launch(table: RequestTable, rows: Rows, step: int) -> Int32Array:
    """Move the lengths on: the tokens will be in pages, the sampled ones known to the device. Returns the new cached lengths [B]."""
    cached_after = table.column(rows.slots, CACHED) + rows.extend
    table.lengths[rows.slots, CACHED] = cached_after
    table.lengths[rows.slots, DEVICE] += rows.is_sampled
    table.last_step[rows.slots] = step
    return cached_after
