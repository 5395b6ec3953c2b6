"""Causal attention of new tokens over their rows' pages: the prefix and the new tokens themselves, which are stored already.

A program takes a tile of new tokens of one row and one query head, and walks the keys: first those that all its queries see, without a
mask, then the few around the diagonal. Rows of any kind may stand side by side; the bits of a row do not depend on the others.

Knows tensors only. Called by the Triton attention backend.

Letters: T new tokens, B rows, H query heads, K KV heads, G = H / K, D head dim, P pages, N tiles.
"""

# ruff: noqa: ANN001, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from minisgl.kernel.gpu.attention_loop import attend, registers_for, softmax_scale
from minisgl.kernel.gpu.launch import Launcher, next_power_of_2

__all__ = ["BLOCK_M", "PrefillConfig", "PrefillRows", "plan_prefill", "prefill_attention", "prefill_config", "shared_bytes"]

Int32Array = npt.NDArray[np.int32]

BLOCK_M = 128
"""New tokens of one tile."""
SMALL = tl.constexpr(1e-30)
"""Less than any sum of exponentials, of which the largest is 1."""
WIDE_SHARED_BYTES = 144 * 1024
"""What tiles of BLOCK_M tokens take where a head is wider than 128. GPUs of sm_86, sm_89 and sm_120 have 99 KiB for a program."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows of a step, int32 [B] on the device."""

    slots: torch.Tensor
    """page-table row"""
    cached_lens: torch.Tensor
    """tokens in pages before this step"""
    extend_lens: torch.Tensor
    """new tokens"""
    starts: torch.Tensor
    """the row's first token among the step's T"""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is built. Changes speed; `block_n` also changes rounding."""

    block_m: int
    """new tokens of a tile; the plan must have been made with the same"""
    block_n: int
    """keys per loop turn"""
    num_stages: int
    num_warps: int
    programs_per_sm: int = 1
    """how many programs the registers must leave room for on a multiprocessor"""


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take on a CUDA device; elsewhere that of sm_90, for compiling ahead."""
    if device.type != "cuda":
        return 227 * 1024
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]  # not in the stubs


@functools.cache
def prefill_config(head_dim: int, dtype: torch.dtype, shared_bytes: int) -> PrefillConfig:
    """The configuration used for a head size and type on a device with so much shared memory for a program."""
    if dtype == torch.float32:
        return PrefillConfig(block_m=32, block_n=16 if head_dim > 128 else 32, num_stages=2, num_warps=4)
    if head_dim > 128 and shared_bytes < WIDE_SHARED_BYTES:
        return PrefillConfig(block_m=64, block_n=32, num_stages=2, num_warps=8)
    if head_dim > 128:
        return PrefillConfig(block_m=BLOCK_M, block_n=64, num_stages=2, num_warps=8)
    return PrefillConfig(block_m=BLOCK_M, block_n=64, num_stages=2, num_warps=8, programs_per_sm=2)


def plan_prefill(cached_lens: Int32Array, extend_lens: Int32Array, block_m: int = BLOCK_M) -> Int32Array:
    """Tiles [N, 2] (batch row, first new token within the row) of rows [B], those with most keys first, so that the tail is short."""
    cached, extend = (np.asarray(lens, dtype=np.int64) for lens in (cached_lens, extend_lens))
    counts = -(-extend // block_m)
    rows = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    keys = cached[rows] + np.minimum(first + block_m, extend[rows])
    order = np.argsort(-keys, kind="stable")
    return np.stack((rows[order], first[order]), axis=1).astype(np.int32)


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    rows: PrefillRows,
    tiles: torch.Tensor,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] (heads contiguous) over one layer's pools [P, K, page_size, D] -> out [T, H, D].

    `page_table` int32 [slots, pages]; `tiles` int32 [N, 2] from `plan_prefill`; scores are scaled by 1 / sqrt(D). Nothing beyond a
    row's length is read.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pool.shape
    num_tiles, _ = tiles.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    config = config or prefill_config(head_dim, q.dtype, shared_bytes(q.device))
    if num_tiles == 0:
        return out
    launch = _prepared(q.stride(0), num_heads, num_kv_heads, head_dim, page_size, config)
    plan = (page_table, rows.slots, rows.cached_lens, rows.extend_lens, rows.starts, tiles)
    launch((num_heads, num_tiles), q, k_pool, v_pool, out, *plan, page_table.stride(0))
    return out


@functools.cache
def _prepared(
    q_stride: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, config: PrefillConfig
) -> Callable[..., None]:
    return _prefill_kernel.prepare(
        Q_STRIDE=q_stride,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        SCALE=softmax_scale(head_dim),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=registers_for(config.num_warps, config.programs_per_sm),
    )


@Launcher
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "slots", "cached_lens", "extend_lens", "starts", "tiles"],
)
def _prefill_kernel(
    q,
    k_pool,
    v_pool,
    out,
    table,
    slots,
    cached_lens,
    extend_lens,
    starts,
    tiles,
    table_stride,
    Q_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    PAGE_STRIDE: tl.constexpr = NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles + tile * 2)
    token = tl.load(tiles + tile * 2 + 1)
    cached = tl.load(cached_lens + row)
    extend = tl.load(extend_lens + row)
    pages = table + tl.load(slots + row).to(tl.int64) * table_stride
    tokens = token + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_used = (tokens < extend)[:, None] & (dims < HEAD_DIM)[None, :]
    place = (tl.load(starts + row) + tokens).to(tl.int64)[:, None]
    columns = head * HEAD_DIM + dims[None, :]
    queries = tl.load(q + place * Q_STRIDE + columns, mask=is_used, other=0.0)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS) * (PAGE_SIZE * HEAD_DIM)
    last = cached + extend - 1
    positions = cached + tokens
    num_plain = (cached + token + 1) // BLOCK_N * BLOCK_N  # keys that the tile's first query sees, and so all of them
    end = tl.minimum(last + 1, cached + token + BLOCK_M)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for IS_MASKED in tl.static_range(2):
        state = attend(
            state,
            queries,
            positions,
            k_pool + kv_head,
            v_pool + kv_head,
            pages,
            num_plain if IS_MASKED else 0,
            end if IS_MASKED else num_plain,
            last,
            PAGE_STRIDE,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_N,
            BLOCK_D,
            SCALE,
            STAGES,
            IS_MASKED,
        )
    acc = state[2] / tl.maximum(state[1], SMALL)[:, None]  # a tile of a row without tokens has seen nothing
    tl.store(out + place * (NUM_HEADS * HEAD_DIM) + columns, acc.to(out.dtype.element_ty), mask=is_used)
