"""SiLU of the gate times the up projection, in one launch; the twin is `kernel.reference.silu_mul`.

Knows tensors only. Called by the layers on a CUDA device.

Letters: T tokens, I intermediate width.
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

__all__ = ["silu_mul"]

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 I], gate in the first half -> [T, I]; the SiLU is computed in fp32 and rounded before the product."""
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    num_blocks, launch = _prepared(width)
    launch((num_tokens, num_blocks), out, gate_up)
    return out


@functools.cache
def _prepared(width: int) -> tuple[int, Callable[..., None]]:
    """Programs of a row, and the launch."""
    block = min(BLOCK, max(next_power_of_2(width), 128))
    return ceil_div(width, block), _silu_mul_kernel.prepare(width, block, num_warps=max(block // 256, 1), **pdl_options())


@Launcher
@triton.jit
def _silu_mul_kernel(out, gate_up, width: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = col < width
    gate = tl.load(gate_up + token * (2 * width) + col, mask=is_inside, other=0.0)
    up = tl.load(gate_up + token * (2 * width) + width + col, mask=is_inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + token * width + col, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=is_inside)
