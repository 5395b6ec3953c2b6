"""Attention by FlashInfer (flashinfer-python), which compiles its kernels with nvcc when a shape is first used.

A step is planned once, on the host, and run for every layer. Decode steps are no CUDA graphs. Imported only where this backend is asked
for.

Letters: T new tokens, B rows, H query heads, K KV heads, D head dim, N pages of all rows together.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.attention.base import BaseAttentionBackend
from minisgl.core import Batch, Int32Array
from minisgl.errors import ConfigError
from minisgl.kernel.staging import Uploader
from minisgl.kvcache.pool import KVPool

__all__ = ["FlashInferAttention", "FlashInferMetadata", "load_flashinfer"]

WORKSPACE_BYTES = 128 * 2**20
"""What the library recommends."""
TENSOR_CORE_GROUP = 4
"""Query heads of a KV head from which on decode is given to tensor cores, as the library recommends."""


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """One step. The library reads the host arrays where it plans."""

    write_slots: torch.Tensor
    """int32 [T] on the device, page * page_size + offset that takes a new token's K/V"""
    pages: torch.Tensor
    """int32 [N] on the device, the rows' pages one after the other"""
    page_starts: torch.Tensor
    """int32 [B + 1] on the host, where each row's pages begin, and N"""
    last_page_lens: torch.Tensor
    """int32 [B] on the host, tokens in each row's last page, >= 1"""
    starts: torch.Tensor | None
    """int32 [B + 1] on the host, where each row's new tokens begin, and T; None where every row computes one"""


class FlashInferAttention(BaseAttentionBackend):
    """Paged attention by a library."""

    description = "fi"
    takes_stored_kv = True

    def __init__(self, pool: KVPool, page_table: torch.Tensor, library: Any) -> None:
        """`library`: the module `flashinfer`, see `load_flashinfer`."""
        super().__init__(pool, page_table)
        self._upload = Uploader(pool.k.device)
        self._library = library
        self._workspace: torch.Tensor | None = None
        self._prefill: Any = None
        self._decode: Any = None
        """these are made where they are first needed, and so belong to what a trial step is found to take"""
        self._planned: FlashInferMetadata | None = None
        self._plan_copied: Any = None
        """event after which the library's own pinned block may be written again"""

    def prepare(self, batch: Batch) -> FlashInferMetadata:
        lengths = batch.cached_lens + batch.extend_lens
        num_pages = -(-lengths // self.pool.page_size)
        page_starts = _starts(num_pages)
        rows = batch.slots.repeat(num_pages)
        columns = np.arange(page_starts[-1], dtype=np.int32) - page_starts[:-1].repeat(num_pages)
        write_slots, rows_there, columns_there = self._upload(batch.write_slots, rows, columns)
        pages = self.page_table[rows_there.long(), columns_there.long()]
        last = lengths - (num_pages - 1) * self.pool.page_size
        starts = None if int(batch.extend_lens.max()) == 1 else torch.from_numpy(_starts(batch.extend_lens))
        return FlashInferMetadata(write_slots, pages, torch.from_numpy(page_starts), torch.from_numpy(last), starts)

    def attend(self, q: torch.Tensor, layer: int, metadata: FlashInferMetadata) -> torch.Tensor:
        if self._planned is not metadata:
            self._plan(q.shape[1], metadata)
        wrapper = self._decode if metadata.starts is None else self._prefill
        out: torch.Tensor = wrapper.run(q, (self.pool.k[layer], self.pool.v[layer]))
        return out

    def _plan(self, num_heads: int, step: FlashInferMetadata) -> None:
        num_kv_heads, page_size, head_dim = self.pool.k.shape[2:]
        if self._plan_copied is not None:
            self._plan_copied.synchronize()
        rows = (step.page_starts, step.pages, step.last_page_lens, num_heads, num_kv_heads, head_dim, page_size)
        dtypes = {"q_data_type": self.pool.k.dtype, "kv_data_type": self.pool.k.dtype}
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.pool.k.device)
        if step.starts is not None:
            if self._prefill is None:
                self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._prefill.plan(step.starts, *rows, causal=True, **dtypes)
        else:
            if self._decode is None:
                use_tensor_cores = num_heads // num_kv_heads >= TENSOR_CORE_GROUP
                make = self._library.BatchDecodeWithPagedKVCacheWrapper
                self._decode = make(self._workspace, "HND", use_tensor_cores=use_tensor_cores)
            self._decode.plan(*rows, **dtypes)
        if self.pool.k.device.type == "cuda":
            self._plan_copied = torch.cuda.current_stream(self.pool.k.device).record_event(self._plan_copied)
        self._planned = step


def load_flashinfer() -> Any:
    """The library. Raises ConfigError with the reason and how to install it."""
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:  # a shared library of it is missing; its parts are of unlike versions
        raise ConfigError(f"--attention-backend fi: {error}; run `pip install flashinfer-python`, or use triton") from error


def _starts(counts: Int32Array) -> Int32Array:
    """int32 [B] -> [B + 1], the sums before each, and of all"""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
