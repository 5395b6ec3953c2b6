"""Where a row's top-k, top-p and min-p end: one limit a row, the least logit that is kept and the last id that is kept among its equals.

No sort: a program takes one row and looks for the limit between two of the row's logits, halving their distance and moving both ends
to logits that exist. The maxima of as many groups as a chunk has values give the first guess; once few values are left between the ends
they are copied to a list, and the row is not read again. The twin is `kernel.sampling.filter_logits`. Knows tensors only. Called by the
engine's sampler, inside its graphs.

Letters: S sampled rows, V vocabulary.
"""

# ruff: noqa: ANN001, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.gpu.launch import Launcher, next_power_of_2
from minisgl.kernel.gpu.pdl import pdl_options

__all__ = ["Filters", "Limits", "find_limits"]

CHUNK_BYTES = 16_384
"""A program looks at so much of its row together; its list holds as many values."""
LOG2_E = tl.constexpr(1.4426950408889634)
LAST_ID = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class Filters:
    """What each slot wants, on the device."""

    is_wanted: torch.Tensor
    """int32 [slots]; 0: the slot's rows are left alone"""
    temperatures: torch.Tensor
    """fp32 [slots]"""
    top_k: torch.Tensor
    """int32 [slots], 0 is off"""
    top_p: torch.Tensor
    """fp32 [slots] in (0, 1], 1 is off"""
    min_p: torch.Tensor
    """fp32 [slots], 0 is off"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is kept of each row: logits above `least`, and of those equal to it the ids up to `last_ids`."""

    least: torch.Tensor
    """fp32 [S]"""
    last_ids: torch.Tensor
    """int32 [S]"""


def find_limits(
    logits: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, filters: Filters, num_ids: int, chunk: int | None = None
) -> Limits:
    """The limits of logits [S, V] (any float type, not scaled by temperature; V contiguous), of the ids below `num_ids`.

    tokens int64 [S]: a row whose token is negative has logits that are not finite; it and rows whose slot wants nothing keep everything.
    slots int32 or int64 [S]. `chunk`: a power of two, 32 or more.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    device = logits.device
    chunk = min(chunk or CHUNK_BYTES // logits.itemsize, max(next_power_of_2(num_ids), 32))
    limits = Limits(torch.empty(num_rows, device=device), torch.empty(num_rows, dtype=torch.int32, device=device))
    lists = torch.empty(num_rows, chunk, device=device)
    numbers = (filters.is_wanted, filters.temperatures, filters.top_k, filters.top_p, filters.min_p)
    sizes = (logits.stride(0), vocab_size, num_ids, chunk)
    num_warps = min(max(chunk // 256, 1), 16)
    outputs = (limits.least, limits.last_ids, lists)
    _limits_kernel((num_rows,), *outputs, logits, tokens, slots, *numbers, *sizes, num_warps=num_warps, **pdl_options())
    return limits


@triton.jit
def _values(source, start, num, bound, chunk: tl.constexpr):
    """The chunk at `start` of `num` values, -inf behind them; memory up to `bound` may be read."""
    index = start + tl.arange(0, chunk)
    x = tl.load(source + index, mask=index < bound, other=-float("inf")).to(tl.float32)
    return tl.where(index < num, x, -float("inf"))


@triton.jit
def _split(source, num, bound, middle, top, factor, is_mass, chunk: tl.constexpr):
    """Of the values above `middle`: weight (number, or mass relative to that of `top`), number, least; and the largest of the others."""
    width: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth  # what one thread loads at once
    weight = tl.zeros([chunk // width], tl.float32)
    count = tl.zeros([chunk // width], tl.int32)
    above = tl.full([chunk // width], float("inf"), tl.float32)
    below = tl.full([chunk // width], -float("inf"), tl.float32)
    for start in range(0, num, chunk):
        # what a thread has loaded is joined at once, which takes fewer registers
        x = tl.reshape(_values(source, start, num, bound, chunk), (chunk // width, width))
        is_above = x > middle
        weight += tl.sum(tl.where(is_above, tl.where(is_mass, tl.exp2((x - top) * factor), 1.0), 0.0), axis=1)
        count += tl.sum(is_above.to(tl.int32), axis=1)
        above = tl.minimum(above, tl.min(tl.where(is_above, x, float("inf")), axis=1))
        below = tl.maximum(below, tl.max(tl.where(is_above, -float("inf"), x), axis=1))
    return tl.sum(weight, axis=0), tl.sum(count, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _search(source, num, bound, start, high, beyond, num_beyond, most, target, top, factor, is_mass, chunk: tl.constexpr):
    """Narrow down the least value t such that the weight of all values above t is below `target`.

    It lies above `start` and at or below `high`, both of the source; the row has `num_beyond` values of weight `beyond` above `high`, which
    the source either lacks or has none of. Ends when one distinct value, or at most `most` values, lie in [low, high]. Gives: a bound
    below `low` above which the weight suffices, or `start`; low; high; values in [low, high]; weight and number above `high`.
    """
    weight, count, low, _ = _split(source, num, bound, start, top, factor, is_mass, chunk)
    bottom = start
    outer, num_outer, num_from_low = beyond + 0 * weight, num_beyond + 0 * count, num_beyond + count
    while (low < high) & (num_from_low - num_outer > most):
        middle = 0.5 * low + 0.5 * high
        middle = tl.where(middle < high, middle, low)
        weight, count, above, below = _split(source, num, bound, middle, top, factor, is_mass, chunk)
        weight += beyond
        count += num_beyond
        is_enough = weight >= target
        bottom = tl.where(is_enough, middle, bottom)
        low = tl.where(is_enough, above, low)
        num_from_low = tl.where(is_enough, count, num_from_low)
        high = tl.where(is_enough, high, below)
        outer = tl.where(is_enough, outer, weight)
        num_outer = tl.where(is_enough, num_outer, count)
    return bottom, low, high, num_from_low - num_outer, outer, num_outer


@triton.jit
def _group_maxima(source, num, bound, chunk: tl.constexpr):
    largest = tl.full([chunk], -float("inf"), tl.float32)
    for start in range(0, num, chunk):
        largest = tl.maximum(largest, _values(source, start, num, bound, chunk))
    return largest


@triton.jit
def _list_between(listed, source, num, bound, low, high, chunk: tl.constexpr):
    """Copy the values in [low, high], at most `chunk`, to `listed`."""
    num_listed = 0
    for start in range(0, num, chunk):
        x = _values(source, start, num, bound, chunk)
        is_between = ((x >= low) & (x <= high)).to(tl.int32)
        count = tl.sum(is_between, axis=0)
        if count > 0:
            tl.store(listed + num_listed + tl.cumsum(is_between, axis=0) - 1, x, mask=is_between > 0)
        num_listed += count


@triton.jit
def _id_of_equal(source, num, bound, value, nth, chunk: tl.constexpr):
    """The id of the nth (from 1) of those equal to `value`, of which there are as many."""
    found = 0
    for start in range(0, num, chunk):
        is_equal = (_values(source, start, num, bound, chunk) == value).to(tl.int32)
        count = tl.sum(is_equal, axis=0)
        if (nth > 0) & (nth <= count):
            is_nth = (is_equal > 0) & (tl.cumsum(is_equal, axis=0) == nth)
            found = start + tl.min(tl.where(is_nth, tl.arange(0, chunk), chunk), axis=0)
        nth -= count
    return found


@triton.jit
def _next_below(x):
    """The largest fp32 below a finite x."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0, bits - 1, tl.where(x < 0, bits + 1, -0x7FFFFFFF))  # of zero: the least negative number
    return bits.to(tl.float32, bitcast=True)


@Launcher
@triton.jit(
    do_not_specialize_on_alignment=["leasts", "last_ids", "tokens", "slots", "is_wanted", "temperatures", "top_ks", "top_ps", "min_ps"]
)
def _limits_kernel(  # noqa: PLR0912, PLR0915 - one launch
    leasts,
    last_ids,
    lists,
    logits,
    tokens,
    slots,
    is_wanted,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    stride: tl.constexpr,
    vocab_size: tl.constexpr,
    num_ids: tl.constexpr,
    chunk: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    infinity: tl.constexpr = float("inf")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
    is_off = (top_k == 0) & (top_p >= 1) & (min_p == 0)
    if is_off | (tl.load(is_wanted + slot) == 0) | (tl.load(tokens + row) < 0):
        tl.store(leasts + row, -infinity)
        tl.store(last_ids + row, LAST_ID)
        return
    piece: tl.constexpr = chunk // 4  # of the list
    source, listed = logits + row.to(tl.int64) * stride, lists + row * chunk
    temperature = tl.load(temperatures + slot)
    factor = LOG2_E / temperature
    maxima = _group_maxima(source, num_ids, vocab_size, chunk)
    top = tl.max(maxima, axis=0)
    tl.store(listed + tl.arange(0, chunk), maxima)
    tl.debug_barrier()
    floor = -infinity + 0 * temperature  # the limit lies above it
    least, last_id = floor, LAST_ID + 0 * top_k
    num_listed = 0 * top_k  # length of the list, if it holds all above the floor
    for stage in range(2):  # top-k, then top-p of what that leaves
        is_mass = stage == 1
        if tl.where(is_mass, top_p < 1, top_k > 0) & (top > -infinity) & (top < infinity):
            target = top_k.to(tl.float32)
            if is_mass:
                if num_listed > 0:
                    target, _, _, _ = _split(listed, num_listed, num_listed, floor, top, factor, is_mass, piece)
                else:
                    target, _, _, _ = _split(source, num_ids, vocab_size, floor, top, factor, is_mass, chunk)
                target *= top_p
            start, low, high, outer = floor, floor, top, 0 * target
            num_between, num_outer, is_whole = num_listed, 0 * top_k, num_listed > 0
            if num_listed == 0:
                if (stage == 0) | (top_k == 0):  # the maxima are in the list still
                    start, _, _, _, _, _ = _search(listed, chunk, chunk, floor, top, 0.0, 0, 0, target, top, factor, is_mass, piece)
                _, low, high, num_between, outer, num_outer = _search(
                    source, num_ids, vocab_size, start, top, 0.0, 0, chunk, target, top, factor, is_mass, chunk
                )
                if num_between <= chunk:
                    tl.debug_barrier()
                    _list_between(listed, source, num_ids, vocab_size, low, high, chunk)
                    tl.debug_barrier()
                    num_listed, start, is_whole = num_between, _next_below(low), num_outer == 0
            lowest_listed = low
            if num_listed > 0:
                _, low, _, num_between, outer, _ = _search(
                    listed, num_listed, num_listed, start, high, outer, num_outer, 0, target, top, factor, is_mass, piece
                )
            least = low
            if is_mass:
                num_kept = tl.maximum(tl.ceil((target - outer) / tl.exp2((low - top) * factor)), 1.0)
                if num_kept < num_between:
                    last_id = _id_of_equal(source, num_ids, vocab_size, low, num_kept.to(tl.int32), chunk)
            else:
                for _ in range(2):  # what the temperature makes equal to it stays too
                    below = _next_below(least)
                    least = tl.where(tl.div_rn(below, temperature) == tl.div_rn(low, temperature), below, least)
                floor = _next_below(least)
                num_listed = tl.where(is_whole & (least >= lowest_listed), num_listed, 0)
    # the probability relative to that of the likeliest token
    least_likely = tl.where(min_p > 0, top + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0)), -infinity)
    tl.store(leasts + row, tl.maximum(least, least_likely))
    tl.store(last_ids + row, tl.where(least_likely > least, LAST_ID, last_id))
