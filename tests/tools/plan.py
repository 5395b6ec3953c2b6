"""Plans by hand: keeps slots, shuffled pages and lengths of a few sequences and builds a step's Batch, without a scheduler.

Called by tests of the engine and of attention. Any mixture of chunks and single tokens may stand in one step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from minisgl.core import Batch, make_batch


@dataclass
class Row:
    """One sequence: its tokens, how many of them are in pages, and where."""

    slot: int
    tokens: list[int]
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens still to be computed."""
        return len(self.tokens) - self.num_cached


class Planner:
    """Rows by uid. Pages and slots are handed out in an order drawn from `seed`, so that nothing depends on their numbers."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int, seed: int = 0) -> None:
        order = random.Random(seed)
        self.page_size = page_size
        self.rows: dict[int, Row] = {}
        self._pages = order.sample(range(num_pages), num_pages)
        self._slots = order.sample(range(num_slots), num_slots)
        self._num_steps = 0

    def add(self, uid: int, tokens: Sequence[int]) -> None:
        self.rows[uid] = Row(self._slots.pop(), list(tokens))

    def drop(self, uid: int) -> None:
        """Give the row's slot and pages back; the next row may get them with what they hold."""
        row = self.rows.pop(uid)
        self._slots.append(row.slot)
        self._pages.extend(row.pages)

    def plan(self, extend: Mapping[int, int], *, is_token_hidden: bool = False) -> Batch:
        """The step that computes `extend[uid]` further tokens of each uid; rows whose last token is among them are sampled.

        `is_token_hidden`: a sampled row's single new token is given as -1, as if only the device knew it.
        """
        uids = sorted(extend)
        columns: dict[str, list[int]] = {name: [] for name in ("input_ids", "positions", "write_slots", "sample_rows", "table_updates")}
        cached = [self.rows[uid].num_cached for uid in uids]
        for number, uid in enumerate(uids):
            row, end = self.rows[uid], self.rows[uid].num_cached + extend[uid]
            assert row.num_cached < end <= len(row.tokens)
            while len(row.pages) * self.page_size < end:
                columns["table_updates"] += [row.slot, len(row.pages), self._pages[-1]]
                row.pages.append(self._pages.pop())
            positions = range(row.num_cached, end)
            columns["positions"] += positions
            columns["write_slots"] += [row.pages[p // self.page_size] * self.page_size + p % self.page_size for p in positions]
            is_sampled = end == len(row.tokens)
            columns["input_ids"] += [-1] if is_token_hidden and is_sampled and extend[uid] == 1 else row.tokens[row.num_cached : end]
            columns["sample_rows"] += [number] if is_sampled else []
            row.num_cached = end
        arrays = {
            "slots": [self.rows[uid].slot for uid in uids],
            "cached_lens": cached,
            "extend_lens": [extend[uid] for uid in uids],
            **columns,
        }
        self._num_steps += 1
        return make_batch(self._num_steps, tuple(uids), {name: np.array(values, dtype=np.int32) for name, values in arrays.items()})

    def page_table(self, num_columns: int, dummy_page: int) -> torch.Tensor:
        """int32 [slots, num_columns] as all updates so far leave it."""
        table = torch.full((1 + max(row.slot for row in self.rows.values()), num_columns), dummy_page, dtype=torch.int32)
        for row in self.rows.values():
            table[row.slot, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        return table
