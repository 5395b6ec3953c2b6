"""Matrix products of very few rows, which only read the matrix: each program takes some outputs and walks their weights once.

What stands before the product (the residual's sum and RMSNorm) and behind it (the gated SiLU) is computed in the same launch. The norm's
scale multiplies the finished sums, so nothing waits for it. Knows tensors only. Called by the layers on a CUDA device, for steps of at
most `MAX_ROWS` tokens.

Letters: T tokens, K inputs, N outputs.
"""

# ruff: noqa: ANN001, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.gpu.launch import Launcher, ceil_div, next_power_of_2
from minisgl.kernel.gpu.pdl import pdl_options

__all__ = ["MAX_ROWS", "LinearConfig", "is_faster", "linear", "linear_config", "norm_linear"]

MAX_ROWS = 4
"""Tokens up to which this may beat a library's product."""
LONG_INPUTS = 4096
SUMS_PER_THREAD = 64
"""Partial sums that a thread may hold."""


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How the kernel is built. Changes speed; `block_k` also changes rounding."""

    block_n: int
    """outputs of a program"""
    block_k: int
    """inputs per loop turn"""
    num_warps: int = 4


def is_faster(num_tokens: int, num_inputs: int, has_norm: bool) -> bool:
    """True if this beats the library's product on an H200: short rows of weights always; long ones for one token, and only where no norm
    has to be computed again by each program."""
    if num_inputs >= LONG_INPUTS:
        return num_tokens == 1 and not has_norm
    return num_tokens <= MAX_ROWS


@functools.cache
def linear_config(num_inputs: int, num_tokens: int = 1, is_gated: bool = False) -> LinearConfig:
    """The configuration used for K inputs; chosen by measurement on an H200.

    All inputs in one turn, where they are few and the registers suffice: then all weights are on their way before the kernel ahead has
    ended, and what the product waits for after that is read at once. A chain of equal products (benchmark/gpu/linear.py) does not show
    this, a decode step does.
    """
    if num_inputs >= LONG_INPUTS:
        block_n, block_k, num_warps = 2 if is_gated else 4, 512, 2  # each gated output reads two rows
    else:
        block_k = next_power_of_2(num_inputs)
        block_n = 4 if block_k <= 1024 else 2
        num_warps = max(1, block_n * block_k // 1024)
    num_sums = next_power_of_2(num_tokens) * (1 + is_gated)
    while num_sums * block_n * block_k > SUMS_PER_THREAD * 32 * num_warps:  # else they would not stay in registers
        block_n, block_k = (block_n // 2, block_k) if block_n > 1 else (1, block_k // 2)
    return LinearConfig(block_n, block_k, num_warps)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_gated: bool = False, config: LinearConfig | None = None
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]; gated: silu(first half) * second half -> [T, N / 2]."""
    return _launch(x, None, None, 0.0, weight, bias, is_gated, config)[0]


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    config: LinearConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear` of rms_norm(x + residual), x + residual); x, residual [T, K], norm (gain [K], eps)."""
    return _launch(x, residual, norm[0], norm[1], weight, bias, is_gated, config)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
    config: LinearConfig | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_inputs = x.shape
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    config = config or linear_config(num_inputs, num_rows, is_gated)
    out = x.new_empty((num_rows, num_outputs))
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    _linear_kernel(
        (ceil_div(num_outputs, config.block_n),),
        out,
        total,
        x,
        x if residual is None else residual,
        x if gain is None else gain,
        weight,
        x if bias is None else bias,
        eps,
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=x.stride(0) if residual is None else residual.stride(0),
        NUM_ROWS=num_rows,
        ROWS=next_power_of_2(num_rows),
        N=num_outputs,
        K=num_inputs,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        HAS_NORM=residual is not None,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        num_warps=config.num_warps,
        **pdl_options(),
    )
    return out, total


@triton.jit
def _weights(weight, places, inputs, K: tl.constexpr):
    return tl.load(weight + places[:, None] + inputs[None, :], mask=(inputs < K)[None, :], other=0.0, eviction_policy="evict_first")


@Launcher
@triton.jit
def _linear_kernel(
    out,
    total,
    x,
    residual,
    gain,
    weight,
    bias,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS)[:, None]
    outputs = program * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    places = tl.minimum(outputs, N - 1).to(tl.int64) * K
    sums = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    gated = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    # the first weights are asked for before the kernel ahead has ended, the others a turn before they are needed
    inputs = tl.arange(0, BLOCK_K)
    w = _weights(weight, places, inputs, K)
    up = _weights(weight + N * K, places, inputs, K) if IS_GATED else w
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for _ in range(0, K, BLOCK_K):
        is_input = inputs < K
        next_w = _weights(weight, places, inputs + BLOCK_K, K)
        next_up = _weights(weight + N * K, places, inputs + BLOCK_K, K) if IS_GATED else next_w
        is_there = (rows < NUM_ROWS) & is_input[None, :]
        values = tl.load(x + rows * X_STRIDE + inputs[None, :], mask=is_there, other=0.0).to(tl.float32)
        if HAS_NORM:
            values += tl.load(residual + rows * RESIDUAL_STRIDE + inputs[None, :], mask=is_there, other=0.0).to(tl.float32)
            rounded = values.to(dtype)
            if program == 0:
                tl.store(total + rows * K + inputs[None, :], rounded, mask=is_there)
            values = rounded.to(tl.float32)
            squares += values * values
            values *= tl.load(gain + inputs, mask=is_input, other=0.0).to(tl.float32)[None, :]
        sums += w.to(tl.float32)[None, :, :] * values[:, None, :]
        if IS_GATED:
            gated += up.to(tl.float32)[None, :, :] * values[:, None, :]
        w, up = next_w, next_up
        inputs += BLOCK_K
    result = tl.sum(sums, 2)
    second = tl.sum(gated, 2)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)
        result *= scale[:, None]
        second *= scale[:, None]
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            second += tl.load(bias + N + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        result = result / (1.0 + tl.exp(-result)) * second
    tl.store(out + rows * N + outputs[None, :], result.to(dtype), mask=(rows < NUM_ROWS) & is_output[None, :])
