"""Attends once with a backend, in both phases, to learn whether it can be used here. Called by the engine's maker and by `doctor`.

Letters: H query heads, D head dim.
"""

from __future__ import annotations

import numpy as np

from minisgl.attention.base import BaseAttentionBackend
from minisgl.core import make_batch

__all__ = ["why_not"]

TOLERANCE = 0.01
"""What stands in the pool besides is zero: a token too many or too few changes a result of 1 by a quarter or more."""


def why_not(backend: BaseAttentionBackend, num_heads: int) -> str | None:
    """Compute one row, two tokens and then a third, with H = `num_heads`, in a pool that nobody uses yet; what went wrong, or None.

    The page table must be filled with pages of the pool.
    """
    pool = backend.pool
    page = int(backend.page_table[0, 0])
    for cached, new in ((0, 2), (2, 1)):
        positions = np.arange(cached, cached + new, dtype=np.int32)
        numbers = {"slots": 0, "cached_lens": cached, "extend_lens": new, "sample_rows": 0}
        arrays = {name: np.array([number], dtype=np.int32) for name, number in numbers.items()}
        arrays |= {"input_ids": positions, "positions": positions, "write_slots": page * pool.page_size + positions % pool.page_size}
        q, k = (pool.k.new_ones((new, heads, pool.k.shape[-1])) for heads in (num_heads, pool.k.shape[2]))
        try:
            result = backend.forward(q, k, k, 0, backend.prepare(make_batch(0, (0,), arrays)))
            is_right = bool(((result - 1).abs() < TOLERANCE).all())
        except Exception as error:  # whatever a library raises is what is to be reported
            return f"{type(error).__name__}: {error}"
        if not is_right:
            return f"wrong result on {pool.k.device}"
    return None
