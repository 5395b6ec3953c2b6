"""Attends with a backend, in both phases, to learn whether it can be used here. Called by the engine's maker and by `doctor`.

Letters: N new tokens, L tokens after the step, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from minisgl.attention.base import BaseAttentionBackend
from minisgl.core import make_batch

__all__ = ["TRIAL_PAGES", "why_not"]

TRIAL_PAGES = 4
"""What a trial takes where a page holds one token."""
POISON = 8.0
"""In places that no token has: as a key and as a value it turns the result."""
TOLERANCE = {4: 1e-3, 2: 5e-2}
"""By bytes of a number; results are of size 1."""


def why_not(backend: BaseAttentionBackend, num_heads: int) -> str | None:
    """Compute a row over two pages, then one token more, with H = `num_heads`, in a pool of TRIAL_PAGES or more that nobody uses yet, and
    compare with dense attention; what went wrong, or None."""
    pool, generator = backend.pool, torch.Generator().manual_seed(1)
    pages = np.arange(TRIAL_PAGES, dtype=np.int32)[::-1][: backend.page_table.shape[1]].copy()
    backend.page_table[0, : len(pages)] = torch.from_numpy(pages).to(backend.page_table)
    pool.k[0].fill_(POISON)
    pool.v[0].fill_(POISON)
    total = min(pool.page_size + 3, len(pages) * pool.page_size)
    q, k, v = (torch.randn(total, n, pool.k.shape[-1], generator=generator).to(pool.k) for n in (num_heads, *[pool.k.shape[2]] * 2))
    for cached, end in ((0, total - 1), (total - 1, total)):
        positions = np.arange(cached, end, dtype=np.int32)
        numbers = {"slots": 0, "cached_lens": cached, "extend_lens": end - cached, "sample_rows": 0}
        arrays = {name: np.array([number], dtype=np.int32) for name, number in numbers.items()}
        slots = pages[positions // pool.page_size] * pool.page_size + positions % pool.page_size
        arrays |= {"input_ids": positions, "positions": positions, "write_slots": slots}
        try:
            result = backend.forward(q[cached:end], k[cached:end], v[cached:end], 0, backend.prepare(make_batch(0, (0,), arrays)))
            away = float((result.float() - _dense(q[cached:end], k[:end], v[:end])).abs().max())
        except Exception as error:  # whatever a library raises is what is to be reported
            return f"{type(error).__name__}: {error}"
        if not away < TOLERANCE[pool.k.element_size()]:
            return f"wrong result on {pool.k.device}"
    return None


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last N of L tokens, in fp32: [N, H, D]; [L, K, D] -> [N, H, D]"""
    keys, values = (tensor.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for tensor in (k, v))
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    return F.scaled_dot_product_attention(q.float().transpose(0, 1), keys, values, attn_mask=mask).transpose(0, 1)
