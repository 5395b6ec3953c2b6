"""Matrices in the layout that oneDNN computes fastest on a CPU. A packed matrix is opaque: it can be multiplied, not read or changed.

The operators are those that torch.compile uses for frozen weights; torch offers no public name for them, so `can_pack` looks whether
they are there. Knows tensors only. Called by the layers.

Letters: T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["can_pack", "pack", "packed_linear"]

ROWS_HINT = 64
"""Rows that the layout is chosen for; measured for 1 to 128 rows, see docs/performance.md."""
MAX_EXACT_ROWS, ROW_STEP = 32, 8
"""oneDNN keeps code for each number of rows, about half a megabyte for each matrix shape, and frees none: above MAX_EXACT_ROWS only
multiples of ROW_STEP are computed."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True for float32 matrices on a CPU whose torch has oneDNN. (bfloat16 and float16 without matrix units gain nothing.)"""
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_operators = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return dtype == torch.float32 and device.type == "cpu" and is_there and has_operators


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A packed copy of `weight` [out, in], which must be what `can_pack` describes."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] times a packed [out, in] transposed, plus bias [out] -> [T, out]."""
    num_rows = len(x)
    if num_rows > MAX_EXACT_ROWS and num_rows % ROW_STEP:
        x = F.pad(x, (0, 0, 0, -num_rows % ROW_STEP))
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product[:num_rows]
