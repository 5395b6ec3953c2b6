"""Logits to tokens in one launch: greedy, or by temperature with the noise of `kernel.sampling`; no softmax pass, no stored noise.

A token wins by noise / probability, least first. With E the noise, the logarithm of that orders tokens like logit / temperature - log E,
greatest first, which needs no sum over the vocabulary. A program takes one block of one row; the last of a row's programs to arrive
joins the blocks. `resample` does the rows again that want more than that. Knows tensors only. Called by the engine's sampler, inside its
graphs.

Letters: S sampled rows, V vocabulary.
"""

# ruff: noqa: ANN001, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.gpu.filter import Filters, Limits, find_limits
from minisgl.kernel.gpu.launch import Launcher, ceil_div, next_power_of_2
from minisgl.kernel.gpu.pdl import pdl_options
from minisgl.kernel.sampling import NUM_ROUNDS

__all__ = ["GREEDY_BELOW", "Workspace", "make_workspace", "resample", "sample"]

GREEDY_BELOW = 1e-5
"""Temperature under which the likeliest token is taken: `core.GREEDY_BELOW`, which stands beside this package, not below it."""

LOG2_E = tl.constexpr(1.4426950408889634)
ROUNDS = tl.constexpr(NUM_ROUNDS)
NOT_GREEDY_FROM = tl.constexpr(GREEDY_BELOW)
HAS_FAST_LOG = tl.constexpr(not triton.knobs.runtime.interpret)
"""The one-instruction logarithm is not in the interpreter."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of one `sample` at a time: the best of each block, and how many blocks of a row are done (all zero between calls)."""

    values: torch.Tensor
    """fp32 [rows, 2, blocks]: the block's largest logit; its best score relative to that"""
    ids: torch.Tensor
    """int32 [rows, blocks]"""
    num_done: torch.Tensor
    """int32 [rows]"""
    block: int
    """tokens of one program"""


def make_workspace(max_rows: int, vocab_size: int, device: torch.device, block: int = 2048) -> Workspace:
    """Memory for `sample` on up to `max_rows` rows and `vocab_size` ids. `block`: tokens of one program, a power of two, 4 or more."""
    num_blocks = ceil_div(vocab_size, block)
    return Workspace(
        values=torch.empty(max_rows, 2, num_blocks, dtype=torch.float32, device=device),
        ids=torch.empty(max_rows, num_blocks, dtype=torch.int32, device=device),
        num_done=torch.zeros(max_rows, dtype=torch.int32, device=device),
        block=block,
    )


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    num_ids: int,
    workspace: Workspace,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token per row of logits [S, V] (any float type, V contiguous) -> int64 [S].

    temperatures fp32 [S], below GREEDY_BELOW the likeliest token; seeds int64 [S]; positions int32 or int64 [S]. With
    `slots` (int32 or int64 [S]) temperatures and seeds have one entry per slot, and row i takes those of slots[i]. Of equals the lowest
    id is taken, an id of `num_ids` or more never. A row whose largest logit is not finite, or that has a NaN, gives -1.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _draw(tokens, logits, (temperatures, seeds, slots), positions, num_ids, workspace, None)
    return tokens


def resample(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    filters: Filters,
    seeds: torch.Tensor,
    num_ids: int,
    workspace: Workspace,
) -> None:
    """Replace the tokens [S] of rows whose slot wants it and that are not negative by one that the slot's filters keep.

    The rest as for `sample`; greedy slots are not filtered, for the likeliest token is always kept.
    """
    limits = find_limits(logits, tokens, slots, filters, num_ids)
    _draw(tokens, logits, (filters.temperatures, seeds, slots), positions, num_ids, workspace, (filters.is_wanted, limits))


def _draw(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    by_slot: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    positions: torch.Tensor,
    num_ids: int,
    workspace: Workspace,
    kept: tuple[torch.Tensor, Limits] | None,
) -> None:
    """`by_slot`: temperatures, seeds and the rows' slots. `kept`: which slots are drawn for, and the rows' limits."""
    num_rows, vocab_size = logits.shape
    num_blocks = ceil_div(num_ids, workspace.block)
    assert num_rows <= len(workspace.num_done)
    assert num_blocks <= workspace.ids.shape[1]
    assert logits.stride(1) == 1
    temperatures, seeds, slots = by_slot
    is_wanted, limits = (None, None) if kept is None else kept
    inputs = (
        logits,
        positions if slots is None else slots,
        temperatures,
        seeds,
        positions,
        workspace.num_done if is_wanted is None else is_wanted,
        temperatures if limits is None else limits.least,
        workspace.num_done if limits is None else limits.last_ids,
        workspace.values,
        workspace.ids,
        workspace.num_done,
    )
    sizes = (
        logits.stride(0),
        vocab_size,
        num_ids,
        workspace.ids.shape[1],
        workspace.block,
        next_power_of_2(num_blocks),
        slots is not None,
        kept is not None,
    )
    num_warps = min(max(workspace.block // 512, 1), 4)
    _sample_kernel((num_blocks, num_rows), tokens, *inputs, *sizes, num_warps=num_warps, **pdl_options())


@triton.jit
def _log2(x):
    return libdevice.fast_log2f(x) if HAS_FAST_LOG else tl.log2(x)


@triton.jit
def _log2_noise(first_id, seed, position, block: tl.constexpr):
    """log2(E) + log2(log2 e), fp32 [block], of the noise E of tokens from first_id (a multiple of 4) on.

    With k the top 24 bits, u = (k + 1/2) / 2**24 and w = 1 - u. Either is exact only below 1/2, where it is the one that matters: small
    noise, which wins, comes from the series of -log(1 - u) in u, all other from the logarithm of w.
    """
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    four = (first_id // 4 + tl.arange(0, block // 4)).to(tl.uint32)
    zero = four * 0
    r0, r1, r2, r3 = tl.philox_impl(four, zero + position.to(tl.uint32), zero, zero, zero + low, zero + high, ROUNDS)
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (block,))
    k = (bits >> 8).to(tl.int32).to(tl.float32)
    u = k * 5.9604644775390625e-08 + 2.98023223876953125e-08
    w = (16777215.0 - k) * 5.9604644775390625e-08 + 2.98023223876953125e-08
    # sum of u**n / n up to n = 5, times log2 e
    series = u * (1.4426950408889634 + u * (0.7213475204444817 + u * (0.48089834696298783 + u * (0.36067376022224085 + u * 0.2885390082))))
    return _log2(tl.where(u < 0.0625, series, -_log2(w)))


@Launcher
@triton.jit(do_not_specialize_on_alignment=["tokens", "slots", "temperatures", "seeds", "positions", "is_wanted", "leasts", "last_ids"])
def _sample_kernel(
    tokens,
    logits,
    slots,
    temperatures,
    seeds,
    positions,
    is_wanted,
    leasts,
    last_ids,
    values,
    ids,
    num_done,
    stride: tl.constexpr,
    vocab_size: tl.constexpr,
    num_ids: tl.constexpr,
    max_blocks: tl.constexpr,
    block: tl.constexpr,
    blocks_padded: tl.constexpr,
    has_slots: tl.constexpr,
    has_limits: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    first_id = tl.program_id(0) * block
    token = first_id + tl.arange(0, block)
    infinity: tl.constexpr = float("inf")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row) if has_slots else row
    if has_limits:  # noqa: SIM102 - known when compiled
        # the program that writes the token waits for all others of its row, which have read it by then
        if (tl.load(is_wanted + slot) == 0) | (tl.load(tokens + row) < 0):
            return
    # the mask of the load follows the vocabulary, whose size is a round number: wide loads
    logit = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocab_size, other=-infinity).to(tl.float32)
    logit = tl.where(token < num_ids, logit, -infinity)
    logit = tl.where(logit == logit, logit, infinity)  # noqa: PLR0124 - false for NaN
    if has_limits:
        least = tl.load(leasts + row)
        is_kept = (logit > least) | ((logit == least) & (token <= tl.load(last_ids + row)))
        logit = tl.where(is_kept, logit, -infinity)
    temperature = tl.load(temperatures + slot)
    is_greedy = temperature < NOT_GREEDY_FROM
    factor = LOG2_E / tl.where(is_greedy, 1.0, temperature)
    largest = tl.max(logit, axis=0)
    score = (logit - tl.where(largest == -infinity, 0.0, largest)) * factor
    if (not is_greedy) & (largest > -infinity):
        score -= _log2_noise(first_id, tl.load(seeds + slot), tl.load(positions + row), block)
    best = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0)

    place = row * max_blocks + tl.program_id(0)
    tl.store(values + (row * 2) * max_blocks + tl.program_id(0), largest)
    tl.store(values + (row * 2 + 1) * max_blocks + tl.program_id(0), best)
    tl.store(ids + place, chosen)
    num_blocks = tl.num_programs(0)
    if tl.atomic_add(num_done + row, 1, sem="acq_rel") == num_blocks - 1:
        other = tl.arange(0, blocks_padded)
        is_block = other < num_blocks
        # .cg: past the first cache, which may hold what another program has replaced since
        tops = tl.load(values + (row * 2) * max_blocks + other, mask=is_block, other=-infinity, cache_modifier=".cg")
        scores = tl.load(values + (row * 2 + 1) * max_blocks + other, mask=is_block, other=-infinity, cache_modifier=".cg")
        candidates = tl.load(ids + row * max_blocks + other, mask=is_block, other=0x7FFFFFFF, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        is_finite = (top > -infinity) & (top < infinity)
        scores = tl.where(is_block, (tops - top) * factor + scores, -infinity)
        token_id = tl.min(tl.where(scores == tl.max(scores, axis=0), candidates, 0x7FFFFFFF), axis=0)
        tl.store(tokens + row, tl.where(is_finite, token_id, -1).to(tl.int64))
        tl.store(num_done + row, 0)
