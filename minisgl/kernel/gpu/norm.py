"""RMSNorm, alone or after a residual addition, in one launch; the twins stand in `kernel.reference`.

Knows tensors only. Called by the layers on a CUDA device.

Letters: T rows, n values per row.
"""

# ruff: noqa: ANN001, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.gpu.launch import Launcher, ceil_div, next_power_of_2
from minisgl.kernel.gpu.pdl import pdl_options

__all__ = ["add_rms_norm", "rms_norm"]

TILE = 1024
"""Values of one program at least: short rows share one."""
VALUES_PER_WARP = 256
"""One load of 16 bytes by each thread, in a half type."""
MAX_WARPS = 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) over the last dimension of x [..., n]: statistics in fp32, rounded to x's type before the gain [n]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(out, out, x, x, weight, eps, adds=False)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, n]; the inputs stay as they are."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(out, total, x, residual, weight, eps, adds=True)
    return out, total


def _launch(
    out: torch.Tensor, total: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, adds: bool
) -> None:
    n = x.shape[-1]
    num_rows = x.numel() // n
    rows, launch = _prepared(n, adds)
    launch((ceil_div(num_rows, rows),), out, total, x, residual, weight, num_rows, eps)


@functools.cache
def _prepared(n: int, adds: bool) -> tuple[int, Callable[..., None]]:
    """Rows of one program, and the launch."""
    cols = next_power_of_2(n)
    rows = max(1, TILE // cols)
    num_warps = min(max(rows * cols // VALUES_PER_WARP, 1), MAX_WARPS)
    return rows, _rms_norm_kernel.prepare(n, adds, rows, cols, num_warps=num_warps, **pdl_options())


@Launcher
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out,
    total,
    x,
    residual,
    weight,
    num_rows,
    eps,
    n: tl.constexpr,
    adds: tl.constexpr,
    rows: tl.constexpr,
    cols: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program normalises `rows` rows, each held whole in registers (`cols`: n, up to a power of two)."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    col = tl.arange(0, cols)[None, :]
    at = row * n + col
    is_inside = (row < num_rows) & (col < n)
    gain = tl.load(weight + col, mask=col < n, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + at, mask=is_inside, other=0.0)
    if adds:
        values = (values.to(tl.float32) + tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(total + at, values, mask=is_inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / n + eps)
    rounded = (wide * scale).to(values.dtype).to(tl.float32)
    tl.store(out + at, (gain.to(tl.float32) * rounded).to(values.dtype), mask=is_inside)
