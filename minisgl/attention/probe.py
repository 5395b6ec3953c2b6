"""Attends once with a backend, in both phases, to learn whether it can be used here. Called by the engine's maker and by `doctor`.

Letters: H query heads, D head dim.
"""

from __future__ import annotations

import numpy as np
import torch

from minisgl.attention.base import BaseAttentionBackend
from minisgl.core import make_batch

__all__ = ["TRIAL_PAGES", "why_not"]

TRIAL_PAGES = 3
"""What a trial takes where a page holds one token."""

TOLERANCE = 0.01
"""A token too many or too few changes a result by a quarter or more."""


def why_not(backend: BaseAttentionBackend, num_heads: int) -> str | None:
    """Compute one row, two tokens and then a third, with H = `num_heads`, in a pool of TRIAL_PAGES or more that nobody uses yet; what went
    wrong, or None."""
    pool = backend.pool
    pages = backend.page_table[0, :TRIAL_PAGES]
    pages.copy_(torch.arange(len(pages)))
    for cached, new in ((0, 2), (2, 1)):
        positions = np.arange(cached, cached + new, dtype=np.int32)
        numbers = {"slots": 0, "cached_lens": cached, "extend_lens": new, "sample_rows": 0}
        arrays = {name: np.array([number], dtype=np.int32) for name, number in numbers.items()}
        arrays |= {"input_ids": positions, "positions": positions, "write_slots": positions}
        q, k = (pool.k.new_ones((new, heads, pool.k.shape[-1])) for heads in (num_heads, pool.k.shape[2]))
        v = k * pool.v.new_tensor(positions + 1).view(-1, 1, 1)  # keys weigh the same, so a token gets the mean of 1, 2, ... its own
        try:
            result = backend.forward(q, k, v, 0, backend.prepare(make_batch(0, (0,), arrays)))
            is_right = bool(((result - pool.v.new_tensor(1 + positions / 2).view(-1, 1, 1)).abs() < TOLERANCE).all())
        except Exception as error:  # whatever a library raises is what is to be reported
            return f"{type(error).__name__}: {error}"
        if not is_right:
            return f"wrong result on {pool.k.device}"
    return None
