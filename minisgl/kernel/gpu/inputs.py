"""What keeps the host off a decode step: its inputs from the plan, the page table's changes, the tokens that the next step needs.

Knows tensors only. Called by the engine on a CUDA device, inside its graphs.

Letters: B rows of a step.
"""

# ruff: noqa: ANN001, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.gpu.launch import Launcher, ceil_div
from minisgl.kernel.gpu.pdl import pdl_options

__all__ = ["decode_inputs", "remember", "update_page_table"]

BLOCK = 128


def decode_inputs(block: torch.Tensor, last_tokens: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions, int64 [B] each, of the first `num_rows` columns of a plan.

    block int32 [3 or more, stride]: slots, input ids (-1: the token that the slot sampled last), positions. last_tokens int64 [slots].
    """
    ids, positions = (torch.empty(num_rows, dtype=torch.int64, device=block.device) for _ in range(2))
    grid = (ceil_div(num_rows, BLOCK),)
    _decode_inputs_kernel(grid, ids, positions, block, last_tokens, num_rows, block.stride(0), BLOCK, **pdl_options())
    return ids, positions


def update_page_table(page_table: torch.Tensor, updates: torch.Tensor, num_updates: torch.Tensor) -> None:
    """page_table[row, column] = page of updates int32 [U, 3], (row, column, page), the first `num_updates`, int32 [1] on the device."""
    grid = (ceil_div(len(updates), BLOCK),)
    _update_page_table_kernel(grid, page_table, updates, num_updates, page_table.stride(0), BLOCK, **pdl_options())


def remember(last_tokens: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """last_tokens[slot] = max(token, 0). last_tokens int64 [slots]; slots int32 or int64 [B]; tokens int64 [B]."""
    num_rows = len(slots)
    _remember_kernel((ceil_div(num_rows, BLOCK),), last_tokens, slots, tokens, num_rows, BLOCK, **pdl_options())


@functools.partial(Launcher, is_made_while_collecting=True)
@triton.jit(do_not_specialize=["num_rows"])
def _decode_inputs_kernel(ids, positions, plan, last_tokens, num_rows, stride: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * block + tl.arange(0, block)
    is_row = row < num_rows
    slot = tl.load(plan + row, mask=is_row, other=0)
    given = tl.load(plan + stride + row, mask=is_row, other=0).to(tl.int64)
    last = tl.load(last_tokens + slot, mask=is_row & (given < 0), other=0)
    tl.store(ids + row, tl.where(given < 0, last, given), mask=is_row)
    tl.store(positions + row, tl.load(plan + 2 * stride + row, mask=is_row, other=0).to(tl.int64), mask=is_row)


@functools.partial(Launcher, is_made_while_collecting=True)
@triton.jit
def _update_page_table_kernel(page_table, updates, num_updates, stride: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0) * block + tl.arange(0, block)
    is_update = index < tl.load(num_updates)
    row = tl.load(updates + 3 * index, mask=is_update, other=0).to(tl.int64)
    column = tl.load(updates + 3 * index + 1, mask=is_update, other=0)
    page = tl.load(updates + 3 * index + 2, mask=is_update, other=0)
    tl.store(page_table + row * stride + column, page, mask=is_update)


@Launcher
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "tokens"])
def _remember_kernel(last_tokens, slots, tokens, num_rows, block: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * block + tl.arange(0, block)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=0)
    token = tl.load(tokens + row, mask=is_row, other=0)
    tl.store(last_tokens + slot, tl.maximum(token, 0), mask=is_row)
