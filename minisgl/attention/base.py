"""What an attention backend does, whichever library it uses. One conformance test runs over all of them.

A backend knows the pool and the page table; it knows no requests, no model and no scheduler.

Letters: T new tokens, B rows, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.core import Batch
from minisgl.kernel.reference import store_kv
from minisgl.kvcache.pool import KVPool

if TYPE_CHECKING:
    from minisgl.attention.triton_backend import TritonAttention

__all__ = ["BaseAttentionBackend", "PhasedAttention"]


class BaseAttentionBackend(ABC):
    """Stores new K/V into pages and attends over a row's pages, causally."""

    description: str
    """its name, and of a library which one"""
    takes_stored_kv: bool = False
    """`attend` may be called alone, after another kernel has stored the step's K/V at `metadata.write_slots`."""

    def __init__(self, pool: KVPool, page_table: torch.Tensor) -> None:
        """`page_table`: int32 [rows, pages per row] on the pool's device, kept up to date by the engine."""
        self.pool = pool
        self.page_table = page_table

    @property
    def graph_part(self) -> TritonAttention | None:
        """What attends inside CUDA graphs, over fixed buffers; None: decode steps are no graphs."""
        return None

    @property
    def extends_in_graphs(self) -> bool:
        """Whether `graph_part` computes prefill steps as this backend does."""
        return self.graph_part is not None

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """What `store` and `attend` need of this step for every layer; the page table holds the step's updates already."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, metadata: Any) -> torch.Tensor:
        """q [T, H, D]; k, v [T, K, D], rotated, of the new tokens -> [T, H, D]. Scores are scaled by 1 / sqrt(D)."""
        self.store(k, v, layer, metadata)
        return self.attend(q, layer, metadata)

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: int, metadata: Any) -> None:
        """Write k, v [T, K, D] of the new tokens into their slots."""
        for pool, new in ((self.pool.k, k), (self.pool.v, v)):
            store_kv(pool[layer], new, metadata.write_slots)

    @abstractmethod
    def attend(self, q: torch.Tensor, layer: int, metadata: Any) -> torch.Tensor:
        """q [T, H, D], heads contiguous, of tokens whose K/V is stored -> [T, H, D]."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """A step and the backend that computes it."""

    backend: BaseAttentionBackend
    metadata: Any

    @property
    def write_slots(self) -> torch.Tensor:
        slots: torch.Tensor = self.metadata.write_slots
        return slots


class PhasedAttention(BaseAttentionBackend):
    """One backend for steps in which every row computes one token, another for all other steps. Both see one pool."""

    def __init__(self, prefill: BaseAttentionBackend, decode: BaseAttentionBackend) -> None:
        super().__init__(decode.pool, decode.page_table)
        self._prefill, self._decode = prefill, decode
        self.description = f"{prefill.description} for prefill, {decode.description} for decode"
        self.takes_stored_kv = prefill.takes_stored_kv and decode.takes_stored_kv

    @property
    def graph_part(self) -> TritonAttention | None:
        return self._decode.graph_part

    @property
    def extends_in_graphs(self) -> bool:
        return self._decode.graph_part is not None and self._prefill.extends_in_graphs

    def prepare(self, batch: Batch) -> _Phase:
        backend = self._decode if int(batch.extend_lens.max()) == 1 else self._prefill
        return _Phase(backend, backend.prepare(batch))

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: int, metadata: _Phase) -> None:
        metadata.backend.store(k, v, layer, metadata.metadata)

    def attend(self, q: torch.Tensor, layer: int, metadata: _Phase) -> torch.Tensor:
        return metadata.backend.attend(q, layer, metadata.metadata)
