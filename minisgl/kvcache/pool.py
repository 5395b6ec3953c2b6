"""The tensors that hold K and V: pages of tokens, per layer. Knows nothing of who owns a page.

Letters: P pages, K KV heads, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.errors import ConfigError

__all__ = ["KVPool", "make_kv_pool"]


@dataclass(frozen=True, slots=True)
class KVPool:
    """K and V of all layers. Page `num_pages` (one beyond the last) is the dummy page: padding writes there and no request owns it."""

    k: torch.Tensor
    """[layers, P + 1, K, page_size, D], zero-filled at the start: masked reads must never meet NaN"""
    v: torch.Tensor
    """[layers, P + 1, K, page_size, D]"""
    num_pages: int
    page_size: int

    @property
    def dummy_page(self) -> int:
        return self.num_pages

    @property
    def num_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()


def bytes_per_page(num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V that one page takes over all layers."""
    return 2 * num_layers * num_kv_heads * page_size * head_dim * dtype.itemsize


def make_kv_pool(
    num_layers: int, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """A zeroed pool of `num_pages` pages and the dummy page; `num_kv_heads` is this rank's share. ConfigError if it does not fit."""
    shape = (num_layers, num_pages + 1, num_kv_heads, page_size, head_dim)
    try:
        k, v = (_zeros(shape, dtype, device) for _ in range(2))
    except (MemoryError, torch.OutOfMemoryError) as error:
        size = 2 * math.prod(shape) * dtype.itemsize / 2**20
        raise ConfigError(f"the system does not give {size:,.0f} MiB for a KV pool of {num_pages} pages; lower --num-pages") from error
    return KVPool(k, v, num_pages, page_size)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU untouched pages cost nothing, since the system supplies them zeroed (torch.zeros would write all of them)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
