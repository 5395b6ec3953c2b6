"""Decode steps as CUDA graphs: one launch for a whole step, from the plan's block to the sampled tokens.

A graph is captured when its size is first needed, between steps, and kept. Which size serves a step follows from the number of rows
alone, so that all ranks replay the same one. Rows that want more than temperature bring a second, small graph, which follows from the
plan too. Rows beyond the step's own are padding: they belong to the dummy slot and write to the dummy page. Knows the model, the backend
and tensors; no requests. Called by the engine.

Letters: n rows of a graph, B rows of a step, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.attention.triton_backend import TritonAttention
from minisgl.core import Batch, Context, Int32Array
from minisgl.distributed import Communicator
from minisgl.engine.memory import graph_size
from minisgl.engine.sampler import Sampler
from minisgl.kernel.gpu.decode_attention import DecodeWork
from minisgl.kernel.gpu.inputs import decode_inputs, remember, update_page_table
from minisgl.kernel.staging import PinnedRing
from minisgl.models.decoder import CausalLM

__all__ = ["DecodeGraphs"]

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 1
"""Runs before a capture: kernels are compiled, and the libraries choose their plans."""
PLAN_FIELDS = ("slots", "input_ids", "positions", "write_slots")
"""Rows of the block that the plan gives, in the order that `decode_inputs` reads."""
LENGTHS, FIRST_PARTIAL, NUM_ROWS = 4, 5, 6
"""Further rows of the block: tokens after the step, and the attention's plan."""
NUM_ITEMS, NUM_UPDATES, HEADER = 0, 1, 4
"""Places behind the rows, padded so that what follows is aligned."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    """[n, V] of the last replay"""
    tokens: torch.Tensor
    """int64 [n]; -1 where the logits are not finite"""


class DecodeGraphs:
    """The captured sizes of one engine, with the buffers that they read."""

    def __init__(
        self,
        model: CausalLM,
        attention: TritonAttention,
        comm: Communicator,
        sampler: Sampler,
        last_tokens: torch.Tensor,
        max_rows: int,
    ) -> None:
        """`last_tokens`: int64 [slots + 1], the token that each slot sampled last. `max_rows`: no larger step is taken."""
        self._model, self._attention, self._comm, self._sampler, self._last_tokens = model, attention, comm, sampler, last_tokens
        self._max_rows = max_rows
        self._device = attention.pool.k.device
        self._dummy_slot = len(last_tokens) - 1
        stride = self._stride = graph_size(max_rows)
        items = NUM_ROWS * stride + HEADER
        self._updates_at, self._items_at = items, items + 3 * stride
        num_items = attention.max_items(stride)
        self._block = torch.zeros(self._items_at + 2 * num_items, dtype=torch.int32, device=self._device)
        rows = self._block[: NUM_ROWS * stride].view(NUM_ROWS, stride)
        header = self._block[NUM_ROWS * stride :]
        self._rows = rows
        self._num_updates = header[NUM_UPDATES : NUM_UPDATES + 1]
        self._updates = self._block[self._updates_at : self._items_at].view(stride, 3)
        self._work = DecodeWork(
            slots=rows[0],
            lengths=rows[LENGTHS],
            first_partial=rows[FIRST_PARTIAL],
            items=self._block[self._items_at :].view(num_items, 2),
            num_items=header[NUM_ITEMS : NUM_ITEMS + 1],
        )
        self._ring = PinnedRing()
        self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        """one for all warm-ups and captures: the libraries keep a workspace for each stream"""
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, _Captured] = {}
        self._resampling: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """by number of rows and what they want of the sampler"""

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Launch the step: (logits [B, V], tokens int64 [B]) on the device, valid until the next step is launched.

        None if no graph can compute it: no decode step, too many rows, or, rarely, more changed pages or chunks than a graph has room for.
        """
        if not batch.is_decode or batch.num_rows > self._max_rows or len(batch.prompt_targets):
            return None
        size = graph_size(batch.num_rows)
        plan = self._attention.plan_decode(batch.positions + 1, size)
        if len(batch.table_updates) > len(self._updates) or len(plan[1]) > len(self._work.items):
            return None
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        self._upload(size, batch, plan)
        captured = self._captured[size]
        captured.graph.replay()
        if kind := self._sampler.on_device.kind(batch.slots):
            self._resample(size, kind)
        return captured.logits[: batch.num_rows], captured.tokens[: batch.num_rows]

    def _upload(self, size: int, batch: Batch | None = None, plan: tuple[Int32Array, Int32Array] | None = None) -> None:
        """Bring the step's numbers to where the graph reads them, in one copy; without a batch: padding rows only."""
        stride = self._stride
        num_rows = 0 if batch is None else batch.num_rows
        block = self._ring.take(len(self._block))
        rows = block.array[: NUM_ROWS * stride].reshape(NUM_ROWS, stride)
        dummy_page = self._attention.pool.num_pages * self._attention.pool.page_size
        rows[:, num_rows:size] = np.array([[self._dummy_slot], [0], [0], [dummy_page], [0], [-1]], dtype=np.int32)
        header = block.array[NUM_ROWS * stride :]
        header[:HEADER] = 0
        end = self._items_at
        if batch is not None and plan is not None:
            first_partial, items = plan
            for row, name in enumerate(PLAN_FIELDS):
                rows[row, :num_rows] = batch.view(name)
            rows[LENGTHS, :num_rows] = batch.positions + 1
            rows[FIRST_PARTIAL, :num_rows] = first_partial
            updates = batch.table_updates
            header[NUM_ITEMS], header[NUM_UPDATES] = len(items), len(updates)
            block.array[self._updates_at : self._updates_at + updates.size] = updates.reshape(-1)
            end += items.size
            block.array[self._items_at : end] = items.reshape(-1)
        self._block[:end].copy_(block.tensor[:end], non_blocking=True)
        block.event = torch.cuda.current_stream(self._device).record_event(block.event)

    def _capture(self, size: int) -> _Captured:
        """Record the step of `size` rows. The runs before it, on padding, change no request's state."""
        start = time.perf_counter()
        self._upload(size)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for _ in range(NUM_WARM_UPS):
                self._compute(size)
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        torch.cuda.synchronize(self._device)
        warm = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            logits, tokens = self._compute(size)
        warm_ms, capture_ms = (warm - start) * 1000, (time.perf_counter() - warm) * 1000
        logger.debug("the decode step of %d rows: run in %.0f ms, captured in %.0f ms", size, warm_ms, capture_ms)
        return _Captured(graph, logits, tokens)

    def _resample(self, size: int, kind: int) -> None:
        """Do rows again that want more than temperature: the first time without a graph, which also compiles what the graph will hold."""
        if (size, kind) in self._resampling:
            self._resampling[size, kind].replay()
            return
        self._compute_others(size, kind)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            self._compute_others(size, kind)
        self._resampling[size, kind] = graph

    def _compute_others(self, size: int, kind: int) -> None:
        """Replace the tokens of the step just computed where `kind` says more."""
        slots, captured = self._rows[0, :size], self._captured[size]
        self._sampler.on_device.resample(captured.tokens, captured.logits, slots, self._rows[LENGTHS, :size], kind)
        remember(self._last_tokens, slots, captured.tokens)

    def _compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The step itself, over the first `size` rows of the block."""
        slots, write_slots = self._rows[0, :size], self._rows[3, :size]
        update_page_table(self._attention.page_table, self._updates, self._num_updates)
        ids, positions = decode_inputs(self._rows, self._last_tokens, size)
        context = Context(self._attention, self._attention.decode_metadata(self._work, write_slots), positions, self._comm)
        hidden = self._model.model.forward(ids, None, context)
        logits = self._model.lm_head.forward(hidden, context)
        tokens = self._sampler.on_device.sample(logits, slots, self._rows[LENGTHS, :size])
        remember(self._last_tokens, slots, tokens)
        return logits, tokens
