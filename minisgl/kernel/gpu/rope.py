"""Per-head RMSNorm (where the model has it), rotation and the K/V write, in one launch over the output of the QKV projection.

The twins are `rms_norm`, `apply_rope` and `store_kv` of `kernel.reference`, one after the other, with the same roundings. Knows tensors
only. Called by the attention layer on a CUDA device.

Letters: T tokens, H query heads, K KV heads, D head dim, P pages.
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

__all__ = ["rope_and_store"]

HEADS = 8
"""Heads of one program."""


def rope_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries [T, H, D] of qkv [T, (H + 2 K) * D]; rotated keys and values go to their pages.

    cos, sin [T, D/2] in qkv's type; `norms`: (gain of q [D], gain of k [D], eps); pools [P, K, page_size, D], alike in strides, with D
    contiguous; write_slots int32 or int64 [T], page * page_size + offset.
    """
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    _, num_kv_heads, page_size, head_dim = k_pool.shape
    num_tokens, num_columns = qkv.shape
    num_heads, strides = num_columns // head_dim - 2 * num_kv_heads, k_pool.stride()
    assert strides == v_pool.stride()
    assert strides[3] == 1
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    q_gain, k_gain, eps = norms or (qkv, qkv, 0.0)
    num_blocks, launch = _prepared((num_heads, num_kv_heads, head_dim, page_size), strides[:3], norms is not None)
    launch((num_tokens, num_blocks), q, k_pool, v_pool, qkv, cos, sin, q_gain, k_gain, write_slots, eps)
    return q


@functools.cache
def _prepared(sizes: tuple[int, int, int, int], strides: tuple[int, ...], has_norms: bool) -> tuple[int, Callable[..., None]]:
    """Programs of a token, and the launch. Sizes: H, K, D and a page's; strides of the pools."""
    num_heads, num_kv_heads, head_dim, _ = sizes
    half_block = next_power_of_2(head_dim // 2)
    num_warps = min(max(HEADS * half_block // 256, 1), 4)
    launch = _rope_and_store_kernel.prepare(*sizes, *strides, has_norms, HEADS, half_block, num_warps=num_warps, **pdl_options())
    return ceil_div(num_heads, HEADS) + 2 * ceil_div(num_kv_heads, HEADS), launch


@triton.jit
def _load(at, is_inside, half: tl.constexpr):
    return tl.load(at, mask=is_inside, other=0.0).to(tl.float32), tl.load(at + half, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def _store(at, first, second, is_inside, half: tl.constexpr):
    tl.store(at, first.to(at.dtype.element_ty), mask=is_inside)
    tl.store(at + half, second.to(at.dtype.element_ty), mask=is_inside)


@triton.jit
def _normalise(first, second, gain, col, eps, head_dim: tl.constexpr):
    """RMSNorm of heads that come in halves, in fp32 but rounded to the gain's type where the twin rounds."""
    square = tl.sum(first * first, axis=1, keep_dims=True) + tl.sum(second * second, axis=1, keep_dims=True)
    scale = tl.rsqrt(square / head_dim + eps)
    dtype: tl.constexpr = gain.dtype.element_ty
    is_inside = col < head_dim // 2
    gain_first = tl.load(gain + col, mask=is_inside, other=0.0).to(tl.float32)
    gain_second = tl.load(gain + head_dim // 2 + col, mask=is_inside, other=0.0).to(tl.float32)
    first = (gain_first * (first * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    second = (gain_second * (second * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotate(first, second, cos, sin, dtype: tl.constexpr):
    """Halves rotated; the first product is rounded as the twin's is."""
    out_first = (first * cos).to(dtype).to(tl.float32) - second * sin
    out_second = (second * cos).to(dtype).to(tl.float32) + first * sin
    return out_first, out_second


@Launcher
@triton.jit
def _rope_and_store_kernel(
    q,
    k_pool,
    v_pool,
    qkv,
    cos,
    sin,
    q_gain,
    k_gain,
    write_slots,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    page_stride: tl.constexpr,
    head_stride: tl.constexpr,
    token_stride: tl.constexpr,
    has_norms: tl.constexpr,
    heads: tl.constexpr,
    half_block: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes `heads` heads of one token: of the queries, the keys or the values, in this order along the second axis."""
    half: tl.constexpr = head_dim // 2
    num_q_blocks: tl.constexpr = (num_heads + heads - 1) // heads
    num_kv_blocks: tl.constexpr = (num_kv_heads + heads - 1) // heads
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    dtype: tl.constexpr = qkv.dtype.element_ty
    # spread over the heads before the loads, so that every load and store has one layout
    col = tl.broadcast_to(tl.arange(0, half_block)[None, :], heads, half_block)
    base = qkv + token * ((num_heads + 2 * num_kv_heads) * head_dim)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    turn_cos = tl.load(cos + token * half + col, mask=col < half, other=0.0).to(tl.float32)
    turn_sin = tl.load(sin + token * half + col, mask=col < half, other=0.0).to(tl.float32)
    if block < num_q_blocks:
        head = block * heads + tl.arange(0, heads)[:, None]
        is_inside = (head < num_heads) & (col < half)
        first, second = _load(base + head * head_dim + col, is_inside, half)
        if has_norms:
            first, second = _normalise(first, second, q_gain, col, eps, head_dim)
        first, second = _rotate(first, second, turn_cos, turn_sin, dtype)
        to_q = q + token * (num_heads * head_dim) + head * head_dim + col
        _store(to_q, first, second, is_inside, half)
    else:
        slot = tl.load(write_slots + token).to(tl.int64)
        is_key = block < num_q_blocks + num_kv_blocks
        head = (block - num_q_blocks - tl.where(is_key, 0, num_kv_blocks)) * heads + tl.arange(0, heads)[:, None]
        is_inside = (head < num_kv_heads) & (col < half)
        to = (slot // page_size) * page_stride + (slot % page_size) * token_stride + head * head_stride + col
        if is_key:
            base += num_heads * head_dim
            first, second = _load(base + head * head_dim + col, is_inside, half)
            if has_norms:
                first, second = _normalise(first, second, k_gain, col, eps, head_dim)
            first, second = _rotate(first, second, turn_cos, turn_sin, dtype)
            _store(k_pool + to, first, second, is_inside, half)
        else:
            base += (num_heads + num_kv_heads) * head_dim
            first, second = _load(base + head * head_dim + col, is_inside, half)
            _store(v_pool + to, first, second, is_inside, half)
