"""Rows of one rank's block of the vocabulary, zeros for the ids of other ranks; the twin is `kernel.reference.vocab_embedding`.

Knows tensors only. Called by the layers on a CUDA device, where the vocabulary is cut over several ranks.

Letters: T tokens, V vocabulary of this rank.
"""

# ruff: noqa: ANN001, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.gpu.launch import Launcher, ceil_div, next_power_of_2
from minisgl.kernel.gpu.pdl import pdl_options

__all__ = ["vocab_embedding"]

BLOCK = 1024


def vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, first_id: int) -> torch.Tensor:
    """ids int64 [T]; weight [V, hidden], rows contiguous, of the ids from `first_id` on -> [T, hidden]. A block may be empty."""
    num_ids, hidden = weight.shape
    out = weight.new_empty(len(ids), hidden)
    block = min(BLOCK, next_power_of_2(hidden))
    grid = (len(ids), ceil_div(hidden, block))
    _vocab_embedding_kernel(grid, out, ids, weight, first_id, num_ids, hidden, block, num_warps=max(block // 256, 1), **pdl_options())
    return out


@Launcher
@triton.jit(do_not_specialize=["first_id", "num_ids"])
def _vocab_embedding_kernel(out, ids, weight, first_id, num_ids, hidden: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(ids + token) - first_id
    is_ours = (row >= 0) & (row < num_ids)
    values = tl.load(weight + row * hidden + col, mask=is_ours & (col < hidden), other=0.0)
    tl.store(out + token * hidden + col, values, mask=col < hidden)
