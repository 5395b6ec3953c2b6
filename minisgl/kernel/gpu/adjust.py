"""Logits as the request wants them, before temperature: bias, banned end ids, penalties for what has been said, in this order.

What a slot has said is one number a token: bit 0 for the prompt, bit 1 for an end id, the rest counts the output. The twins are
`kernel.sampling.apply_penalties` and the engine's sampler on a CPU. Knows tensors only. Called by the engine's sampler, inside its graphs.

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

from minisgl.kernel.gpu.launch import Launcher, ceil_div
from minisgl.kernel.gpu.pdl import pdl_options

__all__ = ["IS_END", "IS_PROMPT", "ONE_OUTPUT", "Said", "Wishes", "adjust", "note"]

IS_PROMPT, IS_END, ONE_OUTPUT = 1, 2, 4
PROMPT_BIT, END_BIT, NOTE = tl.constexpr(IS_PROMPT), tl.constexpr(IS_END), tl.constexpr(ONE_OUTPUT)
BLOCK = 2048
NOTE_BLOCK = 128
PER_ROW = ["slots", "positions", "is_wanted", "repetitions", "frequencies", "presences", "banned_until"]
"""One number for each row: where they lie in memory shall not make another kernel."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What each slot wants, on the device."""

    is_wanted: torch.Tensor
    """int32 [slots]; 0: the slot's rows are left alone"""
    repetition: torch.Tensor
    """fp32 [slots], 1 is off"""
    frequency: torch.Tensor
    """fp32 [slots], 0 is off"""
    presence: torch.Tensor
    """fp32 [slots], 0 is off"""
    banned_until: torch.Tensor
    """int32 [slots]; no end id is taken at a position before"""
    num_biases: torch.Tensor
    """int32 [slots]"""


@dataclass(frozen=True, slots=True)
class Said:
    """Large state of the slots, made when the first needs it."""

    tokens: torch.Tensor
    """int32 [slots, V or more], as the module says"""
    bias_ids: torch.Tensor
    """int32 [slots, a power of two]; the first `num_biases` count, all below V"""
    biases: torch.Tensor
    """fp32 [slots, the same]"""


def adjust(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    wishes: Wishes,
    said: Said,
    block: int = BLOCK,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adjusted logits, fp32 [S, V], of logits [S, V] (any float type, V contiguous); rows of slots that want nothing stay unset.

    slots, positions int32 or int64 [S]; a row's position is the index that its token takes. Columns that `said` lacks are copied.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    if out is None:
        out = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    assert out.stride() == (vocab_size, 1)
    numbers = (wishes.is_wanted, wishes.repetition, wishes.frequency, wishes.presence, wishes.banned_until)
    rows = (out, logits, slots, positions, said.tokens, *numbers)
    sizes = (logits.stride(0), vocab_size, said.tokens.stride(0))
    options = {"num_warps": 4, "enable_fp_fusion": False, **pdl_options()}  # each operation rounds, as in the twins
    _adjust_kernel((ceil_div(vocab_size, block), num_rows), *rows, *sizes, block, **options)
    biases = (wishes.num_biases, said.bias_ids, said.biases)
    _bias_kernel((num_rows,), *rows, *biases, *sizes, said.biases.shape[1], **options)
    return out


def note(said: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Count one output of each row's token; negative ones are not counted. said int32 [slots, V or more]; tokens int64 [S]."""
    num_rows = len(slots)
    _note_kernel((ceil_div(num_rows, NOTE_BLOCK),), said, slots, tokens, num_rows, said.stride(0), NOTE_BLOCK, **pdl_options())


@triton.jit
def _penalised(logit, token, is_known, slot, position, said, repetitions, frequencies, presences, banned_until, said_stride):
    """Ban and penalties of the row's tokens."""
    state = tl.load(said + slot.to(tl.int64) * said_stride + token, mask=is_known, other=0)
    repetition = tl.load(repetitions + slot)
    is_banned = ((state & END_BIT) > 0) & (position < tl.load(banned_until + slot))
    logit = tl.where(is_banned, -float("inf"), logit)
    count = state >> 2
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(((state & PROMPT_BIT) > 0) | (count > 0), repeated, logit)
    logit -= tl.load(frequencies + slot) * count.to(tl.float32)
    return logit - tl.where(count > 0, tl.load(presences + slot), 0.0)


@Launcher
@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _adjust_kernel(
    out,
    logits,
    slots,
    positions,
    said,
    is_wanted,
    repetitions,
    frequencies,
    presences,
    banned_until,
    stride: tl.constexpr,
    vocab_size: tl.constexpr,
    said_stride: tl.constexpr,
    block: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    if tl.load(is_wanted + slot) == 0:
        return
    token = tl.program_id(0) * block + tl.arange(0, block)
    in_row = token < vocab_size
    logit = tl.load(logits + row.to(tl.int64) * stride + token, mask=in_row, other=0).to(tl.float32)
    position = tl.load(positions + row)
    logit = _penalised(
        logit, token, token < said_stride, slot, position, said, repetitions, frequencies, presences, banned_until, said_stride
    )
    tl.store(out + row.to(tl.int64) * vocab_size + token, logit, mask=in_row)


@Launcher
@triton.jit(do_not_specialize_on_alignment=[*PER_ROW, "num_biases"])
def _bias_kernel(
    out,
    logits,
    slots,
    positions,
    said,
    is_wanted,
    repetitions,
    frequencies,
    presences,
    banned_until,
    num_biases,
    bias_ids,
    biases,
    stride: tl.constexpr,
    vocab_size: tl.constexpr,
    said_stride: tl.constexpr,
    most: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tokens with a bias anew: it is added before anything else."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    count = tl.load(num_biases + slot)
    if (tl.load(is_wanted + slot) == 0) | (count == 0):
        return
    index = tl.arange(0, most)
    is_bias = index < count
    token = tl.load(bias_ids + slot * most + index, mask=is_bias, other=0)
    logit = tl.load(logits + row.to(tl.int64) * stride + token, mask=is_bias, other=0).to(tl.float32)
    logit += tl.load(biases + slot * most + index, mask=is_bias, other=0)
    position = tl.load(positions + row)
    logit = _penalised(logit, token, is_bias, slot, position, said, repetitions, frequencies, presences, banned_until, said_stride)
    tl.store(out + row.to(tl.int64) * vocab_size + token, logit, mask=is_bias)


@Launcher
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "tokens"])
def _note_kernel(said, slots, tokens, num_rows, said_stride: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * block + tl.arange(0, block)
    is_row = row < num_rows
    token = tl.load(tokens + row, mask=is_row, other=-1)
    slot = tl.load(slots + row, mask=is_row, other=0)
    place = said + slot.to(tl.int64) * said_stride + token
    is_counted = is_row & (token >= 0)
    # no two rows of a step have one slot, but for padding, whose counts mean nothing
    tl.store(place, tl.load(place, mask=is_counted, other=0) + NOTE, mask=is_counted)
