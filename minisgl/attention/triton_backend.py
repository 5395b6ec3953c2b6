"""Attention by our Triton kernels: the default on a CUDA device. Tests run it on a CPU, in Triton's interpreter.

A step in which every row computes one token goes to the decode kernel, any other to the prefill kernel. The engine's CUDA graphs use
both over buffers of fixed addresses: `decode_metadata` or `extend_metadata` for the capture, then a copy of the plan per step.

Letters: T new tokens, B rows, H query heads, K KV heads, D head dim, N work items or tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minisgl.attention.base import BaseAttentionBackend
from minisgl.core import Batch, Int32Array
from minisgl.kernel.gpu.decode_attention import (
    DecodeConfig,
    DecodeWork,
    Partials,
    TensorDescriptor,
    decode_attention,
    decode_config,
    make_partials,
    max_items,
    plan_decode,
    tile_descriptor,
)
from minisgl.kernel.gpu.prefill_attention import PrefillRows, plan_prefill, prefill_attention, prefill_config, shared_bytes
from minisgl.kernel.staging import Uploader
from minisgl.kvcache.pool import KVPool

__all__ = ["TritonAttention", "TritonMetadata"]

ROW_STEP = 64
"""Scratch memory is for a multiple of so many rows, since graphs round their rows up."""


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """One step on the device, for all layers."""

    write_slots: torch.Tensor
    """integers [T], page * page_size + offset that takes a new token's K/V"""
    decode: DecodeWork | None
    """set where every row computes one token"""
    prefill: tuple[PrefillRows, torch.Tensor] | None
    """otherwise: the rows and the tiles int32 [N, 2]"""


class TritonAttention(BaseAttentionBackend):
    """Paged attention without gathers."""

    description = "triton"
    takes_stored_kv = True

    def __init__(self, pool: KVPool, page_table: torch.Tensor) -> None:
        super().__init__(pool, page_table)
        self._upload = Uploader(pool.k.device)
        self._prefill_config = prefill_config(pool.k.shape[-1], pool.k.dtype, shared_bytes(pool.k.device))
        self._partials: Partials | None = None
        self._tiles: dict[tuple[int, int], tuple[TensorDescriptor, TensorDescriptor]] = {}

    @property
    def graph_part(self) -> TritonAttention:
        return self

    @property
    def prefill_tile(self) -> int:
        """New tokens of one tile, for `plan_prefill`."""
        return self._prefill_config.block_m

    def prepare(self, batch: Batch) -> TritonMetadata:
        cached, extend = batch.cached_lens, batch.extend_lens
        if int(extend.max()) == 1:
            lengths = cached + 1
            first_partial, items = self.plan_decode(lengths, batch.num_rows)
            count = np.array([len(items)], dtype=np.int32)
            write_slots, *work = self._upload(batch.write_slots, batch.slots, lengths, first_partial, items, count)
            return TritonMetadata(write_slots, DecodeWork(*work), None)
        tiles = plan_prefill(cached, extend, self.prefill_tile)
        starts = np.cumsum(extend, dtype=np.int32) - extend
        write_slots, on_device, *rows = self._upload(batch.write_slots, tiles, batch.slots, cached, extend, starts)
        return TritonMetadata(write_slots, None, (PrefillRows(*rows), on_device))

    def plan_decode(self, lengths: Int32Array, num_rows: int) -> tuple[Int32Array, Int32Array]:
        """(first_partial [B], items [N, 2]) of rows with `lengths` [B], for a step of `num_rows`: B, or the rows of the graph."""
        return plan_decode(lengths, self._decode_config(num_rows).chunk)

    def max_items(self, max_rows: int) -> int:
        """Room for the items of steps of up to `max_rows` rows, which nearly all steps fit in."""
        return max_items(max_rows, self.page_table.shape[1] * self.pool.page_size)

    def _decode_config(self, num_rows: int) -> DecodeConfig:
        return decode_config(self.pool.k.shape[-1], self.pool.k.dtype, num_rows, self.pool.page_size)

    def decode_metadata(self, work: DecodeWork, write_slots: torch.Tensor) -> TritonMetadata:
        """What `forward` needs of steps whose plans, made for as many rows as `write_slots` has, are copied into `work` and `write_slots`.

        Run `attend` once outside of a capture first: it compiles the kernel and allocates the scratch memory of all steps.
        """
        return TritonMetadata(write_slots, work, None)

    def extend_metadata(self, write_slots: torch.Tensor, rows: PrefillRows, tiles: torch.Tensor) -> TritonMetadata:
        """The same for prefill steps; tiles that a step does not need name a row without new tokens."""
        return TritonMetadata(write_slots, None, (rows, tiles))

    def attend(self, q: torch.Tensor, layer: int, metadata: TritonMetadata) -> torch.Tensor:
        if metadata.prefill is not None:
            return prefill_attention(
                q, self.pool.k[layer], self.pool.v[layer], self.page_table, *metadata.prefill, None, self._prefill_config
            )
        assert metadata.decode is not None
        config = self._decode_config(len(q))
        k, v = self._pools(layer, config)
        partials = self._partials_for(q, metadata.decode)
        return decode_attention(q, k, v, self.page_table, metadata.decode, partials, None, config)

    def _pools(self, layer: int, config: DecodeConfig) -> tuple[torch.Tensor | TensorDescriptor, torch.Tensor | TensorDescriptor]:
        """K and V of a layer, as the configuration's form takes them; descriptors are made once."""
        if not config.has_descriptors:
            return self.pool.k[layer], self.pool.v[layer]
        key = layer, config.block_n
        if key not in self._tiles:
            k, v = (tile_descriptor(pool[layer], config.block_n) for pool in (self.pool.k, self.pool.v))
            self._tiles[key] = k, v
        return self._tiles[key]

    def _partials_for(self, q: torch.Tensor, work: DecodeWork) -> Partials:
        """Scratch memory for `work`: the one that all steps share, or its own where rows are so many and so long that it is too small."""
        shape = (self.pool.k.shape[2], q.shape[1] // self.pool.k.shape[2], self.pool.k.shape[-1], q.device)
        if self._partials is None:
            num_rows = -(-self.page_table.shape[0] // ROW_STEP) * ROW_STEP
            self._partials = make_partials(self.max_items(num_rows), num_rows, *shape)
        if len(work.items) > len(self._partials.acc) or len(work.slots) > len(self._partials.counters):
            return make_partials(len(work.items), len(work.slots), *shape)
        return self._partials
