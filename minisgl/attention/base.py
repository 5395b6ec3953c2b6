"""What an attention backend does, whichever library it uses. One conformance test runs over all of them.

A backend knows the pool and the page table; it knows no requests, no model and no scheduler.

Letters: T new tokens, B rows, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from minisgl.core import Batch
from minisgl.kvcache.pool import KVPool

__all__ = ["BaseAttentionBackend"]


class BaseAttentionBackend(ABC):
    """Stores new K/V into pages and attends over a row's pages, causally."""

    supports_graphs: ClassVar[bool] = False
    """Attends over fixed buffers too, and over K/V that another kernel has stored: a decode step can be a CUDA graph."""

    def __init__(self, pool: KVPool, page_table: torch.Tensor) -> None:
        """`page_table`: int32 [rows, pages per row] on the pool's device, kept up to date by the engine."""
        self.pool = pool
        self.page_table = page_table

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """What `forward` needs of this step for every layer; the page table holds the step's updates already."""

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, metadata: Any) -> torch.Tensor:
        """q [T, H, D]; k, v [T, K, D], rotated, of the new tokens -> [T, H, D]. Scores are scaled by 1 / sqrt(D)."""
