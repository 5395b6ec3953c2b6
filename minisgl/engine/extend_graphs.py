"""Steps of few prompts as CUDA graphs: what the host needs for launching a prefill step is longer than the step, if the prompt is short.

A graph's size is its number of tokens. It has room for so many rows; further steps, and those whose prompts are scored, are computed
without graphs. See `graphs`.

Letters: T tokens of a step, B rows, R rows of a graph.
"""

from __future__ import annotations

import numpy as np
import torch

from minisgl.core import Batch, Context, Int32Array
from minisgl.engine.graphs import PLAN_FIELDS, GraphParts, Outputs, StepGraphs
from minisgl.engine.memory import extend_graph_rows, extend_graph_size, extend_graph_sizes
from minisgl.kernel.gpu.inputs import decode_inputs, update_page_table
from minisgl.kernel.gpu.prefill_attention import PrefillRows, plan_prefill

__all__ = ["ExtendGraphs"]

MAX_UPDATES = 4096
"""Changed places of the page table in one step."""
SLOTS, CACHED, EXTEND, STARTS, SAMPLED_SLOTS, SAMPLED_LENGTHS, SAMPLED_TOKENS, NUM_ROWS = range(8)
"""Numbers of a row, and of a row that samples: its slot, its new length, its last token's place among the T."""
ALIGNED = 4
"""Numbers of 16 bytes, to which a kernel may want its arrays aligned."""


class ExtendGraphs(StepGraphs):
    """Steps of at most `max_tokens` new tokens in few rows."""

    name = "prefill step of {} tokens"

    def __init__(self, parts: GraphParts, max_tokens: int) -> None:
        self._max_tokens = extend_graph_size(max_tokens)
        self._max_rows = extend_graph_rows(parts.dummy_slot)
        row_stride = -(-(self._max_rows + 1) // ALIGNED) * ALIGNED
        max_tiles = self._num_tiles(self._max_tokens, parts.attention.prefill_tile)
        sizes = [len(PLAN_FIELDS) * self._max_tokens, NUM_ROWS * row_stride, 2 * max_tiles, ALIGNED, 3 * MAX_UPDATES]
        super().__init__(parts, sum(sizes))
        self._ends = np.cumsum(sizes)
        tokens, rows, tiles, header, updates = torch.split(self._block, sizes)
        self._tokens, self._rows = tokens.view(len(PLAN_FIELDS), -1), rows.view(NUM_ROWS, row_stride)
        self._tiles, self._num_updates, self._updates = tiles.view(-1, 2), header[:1], updates.view(-1, 3)

    def _num_tiles(self, size: int, tile: int) -> int:
        """Tiles of `size` tokens in so many rows, at most: each row may leave one unfilled."""
        return size // tile + self._max_rows

    @property
    def sizes(self) -> list[int]:
        return extend_graph_sizes(self._max_tokens)

    def run(self, batch: Batch) -> Outputs | None:
        """None: a decode step, more tokens, rows or changed pages than a graph has room for, or prompts that are scored."""
        if batch.is_decode or batch.num_tokens > self._max_tokens or batch.num_rows > self._max_rows:
            return None
        if len(batch.table_updates) > MAX_UPDATES or len(batch.prompt_targets):
            return None
        if not self._captured:  # the largest first: the others find their memory in what it leaves
            self._capture(self._max_tokens)
        return self.replay(extend_graph_size(batch.num_tokens), batch, batch.slots[batch.sample_rows])

    def upload(self, size: int, batch: Batch | None = None) -> None:
        num_tokens = 0 if batch is None else batch.num_tokens
        block = self._ring.take(len(self._block))
        tokens, rows, tiles, header, updates = np.split(block.array[: len(self._block)], self._ends[:-1])
        tokens, rows, tiles = tokens.reshape(self._tokens.shape), rows.reshape(self._rows.shape), tiles.reshape(-1, 2)
        parts = self._parts
        tokens[:, num_tokens:size] = np.array([[parts.dummy_slot], [0], [0], [parts.dummy_place]], dtype=np.int32)
        rows[:] = 0
        rows[[SLOTS, SAMPLED_SLOTS]] = parts.dummy_slot
        tiles[:] = self._max_rows, 0  # a row without tokens, which is never filled
        header[:] = 0
        if batch is not None:
            self._fill(batch, tokens, rows)
            own = plan_prefill(batch.cached_lens, batch.extend_lens, parts.attention.prefill_tile)
            tiles[: len(own)] = own
            header[0] = len(batch.table_updates)
            updates[: batch.table_updates.size] = batch.table_updates.reshape(-1)
        self._ring.copy(block, self._block, int(self._ends[3]) + 3 * int(header[0]))

    def _fill(self, batch: Batch, tokens: Int32Array, rows: Int32Array) -> None:
        owners = batch.slots.repeat(batch.extend_lens)
        for row, values in enumerate((owners, batch.input_ids, batch.positions, batch.write_slots)):
            tokens[row, : batch.num_tokens] = values
        ends, sampling = batch.extend_lens.cumsum(dtype=np.int32), batch.sample_rows
        for row, values in enumerate((batch.slots, batch.cached_lens, batch.extend_lens, ends - batch.extend_lens)):
            rows[row, : batch.num_rows] = values
        lengths = batch.cached_lens + batch.extend_lens
        for row, values in enumerate((batch.slots, lengths, ends - 1), start=SAMPLED_SLOTS):
            rows[row, : len(sampling)] = values[sampling]

    def compute(self, size: int) -> Outputs:
        parts = self._parts
        update_page_table(parts.attention.page_table, self._updates, self._num_updates)
        ids, positions = decode_inputs(self._tokens, parts.last_tokens, size)
        rows = PrefillRows(*self._rows[: STARTS + 1])
        tiles = self._tiles[: self._num_tiles(size, parts.attention.prefill_tile)]
        metadata = parts.attention.extend_metadata(self._tokens[3, :size], rows, tiles)
        context = Context(parts.attention, metadata, positions, parts.comm)
        wanted = self._rows[SAMPLED_TOKENS, : self._max_rows].long()
        return self._sample(size, parts.model.model.forward(ids, wanted, context), context)

    def sampled(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 - the same for all
        return self._rows[SAMPLED_SLOTS, : self._max_rows], self._rows[SAMPLED_LENGTHS, : self._max_rows]
