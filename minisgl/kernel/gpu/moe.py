"""A mixture of experts without a word to the host: which experts, their pairs in order, two grouped products, one weighted sum.

A pair is a token and one of its experts. `BLOCK_M` pairs of one expert make a block, and a program multiplies a block by a tile of the
expert's matrix, so that a matrix is read once per block. How many blocks there are follows from the router; the grid is as large as it
can get, and programs without a block leave at once. So the launches depend on the number of tokens alone, and a CUDA graph can hold them.
Nothing is added in an order that depends on timing. The twins are `kernel.reference.route` and `kernel.reference.experts`. Knows tensors
only. Called through the MoE backend `triton`.

Letters: T tokens, E experts, k experts per token, P = T * k pairs, I expert width.
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
from minisgl.kernel.gpu.prefill_attention import shared_bytes

__all__ = ["MoEKernelConfig", "experts", "moe_config", "route"]

CHUNK = 1024
"""Pairs that a sorting program reads at once."""
SUM_BLOCK = 1024
"""Values of one program of the weighted sum."""
PAIRS_UNSORTED = 4
"""With this many experts per pair or more, a pair rarely shares its expert: each is a block of its own, and nothing is sorted."""
LARGE_BLOCK_BYTES = 144 * 1024
"""Shared memory that the largest blocks take."""
LAST_ID = tl.constexpr(0xFFFF)
TAKEN = tl.constexpr(-(2**63))


@dataclass(frozen=True, slots=True)
class MoEKernelConfig:
    """How the grouped products are built. Changes speed; `block_k` also changes rounding."""

    block_m: int
    """pairs of a block, 16 or more"""
    block_n: int
    """rows of the matrix that a program takes; 64 or more for the tensor cores' widest instruction"""
    block_k: int
    """inputs per loop turn"""
    num_stages: int
    num_warps: int


@functools.cache
def moe_config(num_pairs: int, num_experts: int, dtype: torch.dtype, num_shared_bytes: int) -> MoEKernelConfig:
    """The configuration used for P pairs over E experts on a device with so much shared memory for a program: the more pairs an expert
    gets on average, the larger the blocks."""
    if dtype == torch.float32:
        return MoEKernelConfig(16, 32, 32, 2, 4)
    if num_pairs <= 8 * num_experts:
        return MoEKernelConfig(16, 64, 128, 4, 4)
    if num_pairs <= 24 * num_experts:
        return MoEKernelConfig(32, 64, 128, 3, 4)
    if num_pairs <= 64 * num_experts or num_shared_bytes < LARGE_BLOCK_BYTES:
        return MoEKernelConfig(64, 128, 64, 4, 4)
    return MoEKernelConfig(128, 256, 64, 4, 8)


def route(router_logits: torch.Tensor, num_experts_per_token: int, is_renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (fp32) and ids (int64), [T, k] each, of the k likeliest experts of router logits [T, E]; of equals the lowest id."""
    num_tokens, num_experts = router_logits.shape
    assert router_logits.stride(1) == 1
    assert num_experts_per_token <= num_experts <= LAST_ID.value
    weights = torch.empty(num_tokens, num_experts_per_token, dtype=torch.float32, device=router_logits.device)
    ids = torch.empty_like(weights, dtype=torch.int64)
    if num_tokens:
        _route_kernel(
            (num_tokens,),
            weights,
            ids,
            router_logits,
            STRIDE=router_logits.stride(0),
            NUM_EXPERTS=num_experts,
            EXPERTS_PADDED=max(next_power_of_2(num_experts), 32),
            NUM_CHOSEN=num_experts_per_token,
            CHOSEN_PADDED=next_power_of_2(num_experts_per_token),
            IS_RENORMALISED=is_renormalised,
            num_warps=1,
            **pdl_options(),
        )
    return weights, ids


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    config: MoEKernelConfig | None = None,
) -> torch.Tensor:
    """Sum of each token's experts. x [T, hidden]; gate_up [E, 2 I, hidden]; down [E, hidden, I]; weights, ids [T, k] -> [T, hidden].

    Matrices contiguous. The products are rounded to x's type, the weighted sum is taken in fp32, in the order of the k.
    """
    num_tokens, hidden_size = x.shape
    num_experts, _, width = down.shape
    num_chosen = ids.shape[1]
    num_pairs = num_tokens * num_chosen
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    config = config or moe_config(num_pairs, num_experts, x.dtype, shared_bytes(x.device))
    if num_pairs * PAIRS_UNSORTED <= num_experts:
        order, owners = None, ids.view(-1)
    else:
        order, owners = _sort(ids, num_experts, config.block_m)
    hidden = x.new_empty(num_pairs, width)
    _grouped_product(hidden, x, gate_up, owners, order, config)
    products = x.new_empty(num_pairs, hidden_size)
    _grouped_product(products, hidden, down, owners, order, config)
    block = min(SUM_BLOCK, next_power_of_2(hidden_size))
    grid = (num_tokens, ceil_div(hidden_size, block))
    num_warps = max(block // 256, 1)
    _sum_kernel(grid, out, products, weights, SIZE=hidden_size, NUM_CHOSEN=num_chosen, BLOCK=block, num_warps=num_warps, **pdl_options())
    return out


def _sort(ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs by expert: their numbers int32 [blocks * block_m], P where a block has none, and each block's expert int32 [blocks], or -1."""
    num_pairs = ids.numel()
    num_blocks = num_pairs // block_m + num_experts
    order = torch.empty(num_blocks * block_m, dtype=torch.int32, device=ids.device)
    owners = torch.empty(num_blocks, dtype=torch.int32, device=ids.device)
    sizes = {"NUM_EXPERTS": num_experts, "BLOCK_M": block_m, "CHUNK": CHUNK}
    _sort_kernel((num_experts,), order, owners, ids, num_pairs, **sizes, num_warps=4, **pdl_options())
    return order, owners


def _grouped_product(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, owners: torch.Tensor, order: torch.Tensor | None, config: MoEKernelConfig
) -> None:
    """out [P, N] = rows of x times their expert's weight [E, N, K]; with twice N rows of weight: silu(first half) * second half.

    x [P, K], or [T, K] when a token's pairs share their row.
    """
    num_pairs, num_outputs = out.shape
    num_inputs = x.shape[1]
    is_gated = weight.shape[1] == 2 * num_outputs
    block_n = min(config.block_n, max(16, next_power_of_2(weight.shape[1])))
    block_k = min(config.block_k, max(16, next_power_of_2(num_inputs)))
    _product_kernel(
        (ceil_div(weight.shape[1], block_n) * len(owners),),
        out,
        x,
        weight,
        owners,
        owners if order is None else order,
        num_pairs,
        PAIRS_PER_ROW=num_pairs // len(x),
        N=num_outputs,
        K=num_inputs,
        BLOCK_M=config.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=config.num_stages,
        IS_GATED=is_gated,
        IS_SORTED=order is not None,
        num_warps=config.num_warps,
        **pdl_options(),
    )


@Launcher
@triton.jit
def _route_kernel(
    weights,
    ids,
    logits,
    STRIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token. An expert's rank is one integer: its logit's bits, made to order like the number, before its id counted from the end."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PADDED)
    is_expert = expert < NUM_EXPERTS
    logit = tl.load(logits + token * STRIDE + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    comparable = tl.where(logit == logit, logit, float("-inf"))  # noqa: PLR0124 - false for NaN
    bits = comparable.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = (ordered.to(tl.int64) << 16) + (LAST_ID - expert)
    rank = tl.where(is_expert, rank, TAKEN)
    place = tl.arange(0, CHOSEN_PADDED)
    chosen = tl.zeros([CHOSEN_PADDED], tl.int64)
    for i in tl.static_range(NUM_CHOSEN):
        best = tl.max(rank, axis=0)
        chosen = tl.where(place == i, best, chosen)
        rank = tl.where(rank == best, TAKEN, rank)
    ordered = (chosen >> 16).to(tl.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    largest = tl.max(comparable, axis=0)
    is_chosen = place < NUM_CHOSEN
    values = tl.where(is_chosen, tl.exp(values - largest), 0.0)
    total = tl.sum(tl.where(is_expert, tl.exp(logit - largest), 0.0), axis=0)
    probability = values / total
    if IS_RENORMALISED:
        probability /= tl.sum(probability, axis=0)
    tl.store(weights + token * NUM_CHOSEN + place, probability, mask=is_chosen)
    tl.store(ids + token * NUM_CHOSEN + place, LAST_ID - (chosen & LAST_ID), mask=is_chosen)


@Launcher
@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    order,
    owners,
    ids,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One expert. Its blocks begin at (pairs of lower experts) // BLOCK_M + (lower experts): room for the last, unfilled block of each."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    pair = tl.arange(0, CHUNK)
    num_lower, num_own = 0, 0
    for first in range(0, num_pairs, CHUNK):
        id = tl.load(ids + first + pair, mask=first + pair < num_pairs, other=NUM_EXPERTS)
        num_lower += tl.sum((id < expert).to(tl.int32), axis=0)
        num_own += tl.sum((id == expert).to(tl.int32), axis=0)
    start = num_lower // BLOCK_M + expert
    end = (num_lower + num_own) // BLOCK_M + expert + 1
    num_blocks = (num_own + BLOCK_M - 1) // BLOCK_M
    for first in range(start, end, CHUNK):
        tl.store(owners + first + pair, tl.where(first + pair < start + num_blocks, expert, -1), mask=first + pair < end)
    unused = num_own + tl.arange(0, BLOCK_M)
    tl.store(order + start * BLOCK_M + unused, tl.zeros([BLOCK_M], tl.int32) + num_pairs, mask=unused < num_blocks * BLOCK_M)
    place = start * BLOCK_M
    for first in range(0, num_pairs, CHUNK):
        id = tl.load(ids + first + pair, mask=first + pair < num_pairs, other=NUM_EXPERTS)
        is_own = (id == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, axis=0) - 1, first + pair, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)


@Launcher
@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["owners", "order"])
def _product_kernel(
    out,
    x,
    weight,
    owners,
    order,
    num_pairs,
    PAIRS_PER_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SORTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of a matrix times one block of pairs. The matrix stands on the left, where the tensor cores want 64 rows or more; gated, its
    rows alternate between gate and up, so that both halves of an output meet."""
    HALVES: tl.constexpr = 2 if IS_GATED else 1
    TILES: tl.constexpr = (N * HALVES + BLOCK_N - 1) // BLOCK_N
    HAS_MASK: tl.constexpr = K % BLOCK_K != 0
    if PDL:
        gdc_wait()
    block = tl.program_id(0) // TILES
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    slot = tl.arange(0, BLOCK_M)
    pair = tl.load(order + block * BLOCK_M + slot) if IS_SORTED else tl.where(slot == 0, block, num_pairs)
    is_pair = pair < num_pairs
    first_output = tl.program_id(0) % TILES * (BLOCK_N // HALVES)
    row = tl.arange(0, BLOCK_N)
    row = tl.minimum(first_output + row // HALVES, N - 1) + row % HALVES * N
    input = tl.arange(0, BLOCK_K)
    weight_at = weight + expert * (N * HALVES * K) + row[:, None].to(tl.int64) * K + input[None, :]
    x_at = x + (pair // PAIRS_PER_ROW).to(tl.int64)[:, None] * K + input[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if HAS_MASK:
            is_input = (first + input < K)[None, :]
            w = tl.load(weight_at + first, mask=is_input, other=0.0)
            values = tl.load(x_at + first, mask=is_pair[:, None] & is_input, other=0.0)
        else:
            w = tl.load(weight_at + first)
            values = tl.load(x_at + first, mask=is_pair[:, None], other=0.0)
        sums = tl.dot(w, tl.trans(values), sums, input_precision="ieee")
    if PDL:
        gdc_launch_dependents()
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
        sums = gate / (1.0 + tl.exp(-gate)) * up
    output = (first_output + tl.arange(0, BLOCK_N // HALVES))[None, :]
    place = pair.to(tl.int64)[:, None] * N + output
    tl.store(out + place, tl.trans(sums).to(out.dtype.element_ty), mask=is_pair[:, None] & (output < N))


@Launcher
@triton.jit
def _sum_kernel(out, products, weights, SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + i
        product = tl.load(products + pair * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * product
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)
