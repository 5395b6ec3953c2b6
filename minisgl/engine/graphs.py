"""Steps as CUDA graphs: one launch for a whole step, from the plan's block to the sampled tokens.

A graph is captured when its size is first needed, between steps, and kept. Which size serves a step follows from the plan alone, so that
all ranks replay the same one. Rows that want more than temperature bring a second, small graph, which follows from the plan too. What a
graph has beyond the step's own rows is padding: it belongs to the dummy slot and writes to the dummy page. Knows the model, the backend
and tensors; no requests. Called by the engine. Decode steps are here, the steps of prompts in `extend_graphs`.

Letters: n rows of a graph, S sampled rows of a step, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from minisgl.attention.triton_backend import TritonAttention
from minisgl.core import Batch, Context, Int32Array
from minisgl.distributed import Communicator
from minisgl.engine.device_sampler import ADJUSTED, FILTERED
from minisgl.engine.memory import graph_size, graph_sizes
from minisgl.engine.sampler import Sampler
from minisgl.kernel.gpu.decode_attention import DecodeWork
from minisgl.kernel.gpu.inputs import decode_inputs, remember, update_page_table
from minisgl.kernel.staging import PinnedRing
from minisgl.models.decoder import CausalLM

__all__ = ["DecodeGraphs", "GraphParts", "Recorder", "StepGraphs"]

logger = logging.getLogger(__name__)

PLAN_FIELDS = ("slots", "input_ids", "positions", "write_slots")
"""Rows of the block that the plan gives, in the order that `decode_inputs` reads."""
LENGTHS, FIRST_PARTIAL, NUM_ROWS = 4, 5, 6
"""Further rows of the block: tokens after the step, and the attention's plan."""
NUM_ITEMS, NUM_UPDATES, HEADER = 0, 1, 4
"""Places behind the rows, padded so that what follows is aligned."""

Outputs = tuple[torch.Tensor, torch.Tensor]
"""Logits [n, V] and tokens int64 [n], -1 where the logits are not finite."""


class Recorder:
    """Captures graphs that share one stream, whose workspace the libraries keep, and one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, compute: Callable[[], object]) -> None:
        """Run once where it will be captured: kernels are compiled, and the libraries choose their plans."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        torch.cuda.synchronize(self._device)

    def capture(self, compute: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """The graph of what `compute` launches, and the tensors that it returns, which each replay writes."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            outputs = compute()
        return graph, outputs


@dataclass(frozen=True, slots=True)
class GraphParts:
    """What the graphs of one engine compute with."""

    model: CausalLM
    attention: TritonAttention
    comm: Communicator
    sampler: Sampler
    last_tokens: torch.Tensor
    """int64 [slots + 1], the token that each slot sampled last, and one for padding"""
    recorder: Recorder

    @property
    def dummy_slot(self) -> int:
        return len(self.last_tokens) - 1

    @property
    def dummy_place(self) -> int:
        """where K and V of padding are written"""
        return self.attention.pool.num_pages * self.attention.pool.page_size


class StepGraphs(ABC):
    """The captured sizes of one kind of step, with the buffers that they read."""

    name: str
    """with the size in braces"""

    def __init__(self, parts: GraphParts, block_size: int) -> None:
        """`block_size`: numbers that a step brings to the device, at most."""
        self._parts = parts
        self._device = parts.attention.pool.k.device
        self._block = torch.zeros(block_size, dtype=torch.int32, device=self._device)
        self._ring = PinnedRing()
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._resampling: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """by size and what its rows want of the sampler"""

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """All that may be captured."""

    @abstractmethod
    def run(self, batch: Batch) -> Outputs | None:
        """Launch the step: (logits [S, V], tokens int64 [S]) on the device, valid until the next step is launched.

        None if no graph of these can compute it.
        """

    @abstractmethod
    def upload(self, size: int, batch: Batch | None = None) -> None:
        """Bring the step's numbers to where the graph reads them, in one copy; without a batch: padding only."""

    @abstractmethod
    def compute(self, size: int) -> Outputs:
        """The step itself, over what has been uploaded."""

    @abstractmethod
    def sampled(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and lengths, int32 [n] each, of the rows whose tokens are sampled; a length is the index of the new token."""

    def rehearse(self) -> None:
        """Run what graphs of all sizes will hold, on padding, with all that rows may want of the sampler."""
        for size in self.sizes:
            self.upload(size)
            outputs = self.compute(size)
            for kind in (FILTERED, ADJUSTED):
                self._compute_others(size, kind, outputs)

    def replay(self, size: int, batch: Batch, slots: Int32Array) -> Outputs:
        """Launch `size`, captured if need be, with the batch's numbers; `slots` [S] are those that sample."""
        if size not in self._captured:
            self._capture(size)
        self.upload(size, batch)
        graph, (logits, tokens) = self._captured[size]
        graph.replay()
        if kind := self._parts.sampler.on_device.kind(slots):
            self._resample(size, kind)
        return logits[: len(slots)], tokens[: len(slots)]

    def _capture(self, size: int) -> None:
        """Record the step of `size`. The runs before it, on padding, change no request's state."""
        start = time.perf_counter()
        self.upload(size)
        self._parts.recorder.warm_up(lambda: self.compute(size))
        warm = time.perf_counter()
        self._captured[size] = self._parts.recorder.capture(lambda: self.compute(size))
        warm_ms, capture_ms = (warm - start) * 1000, (time.perf_counter() - warm) * 1000
        logger.debug("the %s: run in %.0f ms, captured in %.0f ms", self.name.format(size), warm_ms, capture_ms)

    def _resample(self, size: int, kind: int) -> None:
        """Do rows again that want more than temperature: the first time without a graph, which also compiles what the graph will hold."""
        outputs = self._captured[size][1]
        if (size, kind) in self._resampling:
            self._resampling[size, kind].replay()
            return
        self._compute_others(size, kind, outputs)
        self._resampling[size, kind] = self._parts.recorder.capture(lambda: self._compute_others(size, kind, outputs))[0]

    def _compute_others(self, size: int, kind: int, outputs: Outputs) -> Outputs:
        """Replace the tokens of the step just computed where `kind` says more."""
        logits, tokens = outputs
        slots, lengths = self.sampled(size)
        self._parts.sampler.on_device.resample(tokens, logits, slots, lengths, kind)
        remember(self._parts.last_tokens, slots, tokens)
        return outputs

    def _sample(self, size: int, hidden: torch.Tensor, context: Context) -> Outputs:
        """From hidden states [n, hidden] of the rows that sample."""
        logits = self._parts.model.lm_head.forward(hidden, context)
        slots, lengths = self.sampled(size)
        tokens = self._parts.sampler.on_device.sample(logits, slots, lengths)
        remember(self._parts.last_tokens, slots, tokens)
        return logits, tokens


class DecodeGraphs(StepGraphs):
    """Steps in which each row computes one token and samples; a graph's size is its number of rows."""

    name = "decode step of {} rows"

    def __init__(self, parts: GraphParts, max_rows: int) -> None:
        """`max_rows`: no larger step is taken."""
        self._max_rows = max_rows
        stride = self._stride = graph_size(max_rows)
        self._updates_at = NUM_ROWS * stride + HEADER
        self._items_at = self._updates_at + 3 * stride
        num_items = parts.attention.max_items(stride)
        super().__init__(parts, self._items_at + 2 * num_items)
        rows = self._rows = self._block[: NUM_ROWS * stride].view(NUM_ROWS, stride)
        header = self._block[NUM_ROWS * stride :]
        self._num_updates = header[NUM_UPDATES : NUM_UPDATES + 1]
        self._updates = self._block[self._updates_at : self._items_at].view(stride, 3)
        self._work = DecodeWork(
            slots=rows[0],
            lengths=rows[LENGTHS],
            first_partial=rows[FIRST_PARTIAL],
            items=self._block[self._items_at :].view(num_items, 2),
            num_items=header[NUM_ITEMS : NUM_ITEMS + 1],
        )
        self._plan: tuple[Int32Array, Int32Array] | None = None
        """the attention's, of the step that comes next"""
        self._has_told = False

    @property
    def sizes(self) -> list[int]:
        return graph_sizes(self._max_rows)

    def run(self, batch: Batch) -> Outputs | None:
        """None: no decode step, too many rows, or more changed pages or chunks than a graph has room for: millions of tokens together."""
        if not batch.is_decode or batch.num_rows > self._max_rows or len(batch.prompt_targets):
            return None
        size = graph_size(batch.num_rows)
        self._plan = self._parts.attention.plan_decode(batch.positions + 1, size)
        num_items, most = len(self._plan[1]), len(self._work.items)
        if num_items > most and not self._has_told:
            logger.warning("a decode step has %d chunks of K/V, CUDA graphs have room for %d; such steps take longer", num_items, most)
            self._has_told = True
        if len(batch.table_updates) > len(self._updates) or num_items > most:
            return None
        return self.replay(size, batch, batch.slots)

    def upload(self, size: int, batch: Batch | None = None) -> None:
        stride = self._stride
        num_rows = 0 if batch is None else batch.num_rows
        block = self._ring.take(len(self._block))
        rows = block.array[: NUM_ROWS * stride].reshape(NUM_ROWS, stride)
        padding = [[self._parts.dummy_slot], [0], [0], [self._parts.dummy_place], [0], [-1]]
        rows[:, num_rows:size] = np.array(padding, dtype=np.int32)
        header = block.array[NUM_ROWS * stride :]
        header[:HEADER] = 0
        end = self._items_at
        if batch is not None and self._plan is not None:
            first_partial, items = self._plan
            for row, values in enumerate((*map(batch.view, PLAN_FIELDS), batch.positions + 1, first_partial)):
                rows[row, :num_rows] = values
            updates = batch.table_updates
            header[NUM_ITEMS], header[NUM_UPDATES] = len(items), len(updates)
            block.array[self._updates_at : self._updates_at + updates.size] = updates.reshape(-1)
            end += items.size
            block.array[self._items_at : end] = items.reshape(-1)
        self._ring.copy(block, self._block, end)

    def compute(self, size: int) -> Outputs:
        parts = self._parts
        update_page_table(parts.attention.page_table, self._updates, self._num_updates)
        ids, positions = decode_inputs(self._rows, parts.last_tokens, size)
        metadata = parts.attention.decode_metadata(self._work, self._rows[3, :size])
        context = Context(parts.attention, metadata, positions, parts.comm)
        return self._sample(size, parts.model.model.forward(ids, None, context), context)

    def sampled(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows[0, :size], self._rows[LENGTHS, :size]
