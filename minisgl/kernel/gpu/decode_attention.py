"""Attention of one new token per row over its pages, as one kernel whose launch does not depend on the lengths.

Rows are cut into chunks of fixed size, and a fixed number of programs walks the list of (row, chunk), once per KV head. A row of one
chunk writes its output at once. The chunks of a longer row leave partial results; the program that arrives last adds them in the
order of the chunks. So the bits of a row depend on its own length and the number of rows only, never on which program ran first.
Every device buffer has a fixed address: the launch can be part of a CUDA graph, and the plan of a step is a copy into `DecodeWork`.

Knows tensors only. Called by the Triton attention backend.

Letters: B rows, H query heads, K KV heads, G = H / K, D head dim, P pages, N work items.
"""

# ruff: noqa: ANN001, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.kernel.gpu.attention_loop import attend, attend_tiles, registers_for, softmax_scale
from minisgl.kernel.gpu.launch import Launcher, next_power_of_2
from minisgl.kernel.gpu.pdl import pdl_options

__all__ = [
    "CHUNK",
    "FEW_ROWS",
    "DecodeConfig",
    "DecodeWork",
    "Form",
    "Partials",
    "TensorDescriptor",
    "decode_attention",
    "decode_config",
    "make_partials",
    "max_items",
    "plan_decode",
    "tile_descriptor",
]

Int32Array = npt.NDArray[np.int32]

Form = Literal["masked", "split", "tma", "swapped"]
"""The inner loop. masked: every tile is masked, any page size and head dim. split: full tiles without a mask, then one masked tile. tma:
split, full tiles fetched by descriptors. swapped: tma with keys as the rows of the scores, where queries are padded to 8 and not to 16."""

CHUNK = 512
"""Tokens of K and V in one work item."""
FEW_ROWS, FEW_ROWS_CHUNK = 8, 256
"""Up to so many rows, chunks are shorter, since longer ones would leave multiprocessors idle."""
SHARES = ((16, 256, 12), (32, 512, 12), (112, 512, 10), (144, 1024, 10), (None, 1024, 12))
"""Rows up to which programs of one warp share the work so: the chunk, and programs for each multiprocessor. Measured on an H200 with
lengths as they are early and late in the offline workload (benchmark/gpu/attention.py --shares): 3 to 15 % faster than one choice, but
4 % slower at 24 rows."""
MAX_ITEMS = 8192
"""More are not planned for: their partial results take 32 KiB each for 64 query heads of 128 numbers."""
COMBINE_ELEMENTS = 1024
"""Partial numbers that the combining program holds at once."""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A step's plan on the device, int32. The addresses stay; a step copies new contents."""

    slots: torch.Tensor
    """[max_rows] page-table row of each batch row"""
    lengths: torch.Tensor
    """[max_rows] tokens of K and V that the row sees, its new one included; 0 for a padding row"""
    first_partial: torch.Tensor
    """[max_rows] place of the row's first partial result; -1 for a row of one chunk or none"""
    items: torch.Tensor
    """[max_items, 2] (batch row, chunk index); those beyond `num_items` are not worked on, but must name rows below max_rows"""
    num_items: torch.Tensor
    """[1] how many of `items` are filled"""


@dataclass(frozen=True, slots=True)
class Partials:
    """Scratch memory of `decode_attention`; one launch at a time may use it."""

    acc: torch.Tensor
    """fp32 [max_items, K, G, D]: output of one chunk alone"""
    lse: torch.Tensor
    """fp32 [max_items, K, G]: base-2 logarithm of the chunk's sum of exponentials"""
    counters: torch.Tensor
    """int32 [max_rows, K]: chunks that have arrived; zero between launches"""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is built. Changes speed; `block_n` also changes rounding."""

    block_n: int
    """keys per loop turn; divides the chunk"""
    num_stages: int
    num_warps: int
    programs_per_sm: int
    chunk: int = CHUNK
    """tokens per item; the plan must have been made with the same"""
    form: Form = "masked"
    """where `has_tiles` says no, the masked loop runs whatever this is"""

    @property
    def has_descriptors(self) -> bool:
        return self.form in ("tma", "swapped")

    def has_tiles(self, head_dim: int, page_size: int) -> bool:
        """Whether the form is another than masked and K and V can be cut for it: pages of whole tiles, a head dim of 16, 32, 64, ..."""
        is_power = head_dim >= 16 and head_dim & (head_dim - 1) == 0
        return self.form != "masked" and is_power and page_size % self.block_n == 0


@functools.cache
def decode_config(head_dim: int, dtype: torch.dtype, num_rows: int, page_size: int) -> DecodeConfig:
    """The configuration used for a head size, type, rows of the step (padding of its graph included) and page size.

    Its form is one that runs with them: nobody makes descriptors of what cannot be cut into tiles.
    """
    chunk = FEW_ROWS_CHUNK if num_rows <= FEW_ROWS else CHUNK
    if dtype == torch.float32:
        return DecodeConfig(block_n=32, num_stages=2, num_warps=4, programs_per_sm=2, chunk=chunk)
    if head_dim > 128:
        return DecodeConfig(block_n=32, num_stages=3, num_warps=4, programs_per_sm=2, chunk=chunk)
    if num_rows <= FEW_ROWS:
        config = DecodeConfig(block_n=64, num_stages=3, num_warps=2, programs_per_sm=3, chunk=chunk, form="swapped")
    else:  # one warp a program: no barrier stands in the loop
        chunk, programs_per_sm = next(share for most, *share in SHARES if most is None or num_rows <= most)
        config = DecodeConfig(block_n=16, num_stages=3, num_warps=1, programs_per_sm=programs_per_sm, chunk=chunk, form="split")
    return config if config.has_tiles(head_dim, page_size) else replace(config, form="masked")


def max_items(max_rows: int, max_len: int) -> int:
    """Room for the work items of up to `max_rows` rows of at most `max_len` tokens, in chunks of `decode_config`: for all, or MAX_ITEMS.

    The size of the pool is no bound, since rows share pages. Compare the length of a plan with this before copying it.
    """
    shares = ((max_rows, CHUNK), (FEW_ROWS, FEW_ROWS_CHUNK), *((most or max_rows, chunk) for most, chunk, _ in SHARES))
    return min(MAX_ITEMS, max(min(max_rows, rows) * -(-max_len // chunk) for rows, chunk in shares))


def plan_decode(lengths: Int32Array, chunk: int = CHUNK) -> tuple[Int32Array, Int32Array]:
    """(first_partial [B], items [N, 2]) of rows with `lengths` [B]. Rows of length 0 get no item.

    Whole chunks come first, longest row first; then the last chunks by falling size, so that all programs end together.
    """
    lengths = np.asarray(lengths, dtype=np.int32)
    num_chunks = (lengths + (chunk - 1)) // chunk
    num_partials = np.where(num_chunks > 1, num_chunks, 0)
    first_partial = np.where(num_chunks > 1, np.cumsum(num_partials) - num_partials, -1).astype(np.int32)
    num_whole = lengths // chunk
    order = np.argsort(-num_whole.astype(np.int16), kind="stable")  # int16 is sorted by digits
    counts = num_whole[order]
    total = int(counts.sum())
    rest = lengths - num_whole * chunk
    ends = np.argsort(-rest.astype(np.int16), kind="stable")[: int(np.count_nonzero(rest))]
    items = np.empty((total + len(ends), 2), dtype=np.int32)
    items[:total, 0] = np.repeat(order, counts)
    items[:total, 1] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    items[total:, 0] = ends
    items[total:, 1] = num_whole[ends]
    return first_partial, items


def make_partials(num_items: int, max_rows: int, num_kv_heads: int, group: int, head_dim: int, device: torch.device) -> Partials:
    """Scratch memory for `num_items` items of `group` query heads for each KV head; its counters are zeroed here, once."""
    return Partials(
        torch.empty((num_items, num_kv_heads, group, head_dim), dtype=torch.float32, device=device),
        torch.empty((num_items, num_kv_heads, group), dtype=torch.float32, device=device),
        torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device),
    )


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where the interpreter runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def tile_descriptor(pool: torch.Tensor, block_n: int) -> TensorDescriptor:
    """`pool` [P, K, page_size, D] as seen by the forms "tma" and "swapped". Make it once: that costs the host more than a launch."""
    head_dim = pool.shape[-1]
    return TensorDescriptor(pool, [pool.numel() // head_dim, head_dim], [head_dim, 1], [block_n, head_dim])


def _with_tiles(
    pool: torch.Tensor | TensorDescriptor, config: DecodeConfig, is_tiled: bool
) -> tuple[torch.Tensor, TensorDescriptor | None]:
    """The pool, and its descriptor if the loop takes one."""
    base = pool.base if isinstance(pool, TensorDescriptor) else pool
    if not is_tiled or not config.has_descriptors:
        return base, None
    return base, pool if isinstance(pool, TensorDescriptor) else tile_descriptor(pool, config.block_n)


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor | TensorDescriptor,
    v_pool: torch.Tensor | TensorDescriptor,
    page_table: torch.Tensor,
    work: DecodeWork,
    partials: Partials,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Attention of q [B, H, D] (heads contiguous) over one layer's pools, K and V [P, K, page_size, D] each -> out [B, H, D].

    The forms "tma" and "swapped" need descriptors of the pools: give them in place of the pools, or they are made here. `page_table` is
    int32 [slots, pages]; scores are scaled by 1 / sqrt(D). Nothing beyond a row's length is used. Rows of length 0 are not written: what
    they hold afterwards has no meaning. Without `config` the plan must have the chunk that `decode_config` gives for B rows.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = (k_pool.base if isinstance(k_pool, TensorDescriptor) else k_pool).shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    config = config or decode_config(head_dim, q.dtype, num_rows, page_size)
    num_programs = min(num_multiprocessors(q.device) * config.programs_per_sm, len(work.items) * num_kv_heads)
    if num_rows == 0 or num_programs == 0:
        return out
    is_tiled = config.has_tiles(head_dim, page_size)
    k_pool, k_tiles = _with_tiles(k_pool, config, is_tiled)
    v_pool, v_tiles = _with_tiles(v_pool, config, is_tiled)
    plan = (work.slots, work.lengths, work.first_partial, work.items, work.num_items, partials.acc, partials.lse, partials.counters)
    launch = _prepared(q.stride(0), num_heads, num_kv_heads, head_dim, page_size, config)
    launch((num_programs,), q, k_pool, v_pool, k_tiles, v_tiles, out, page_table, *plan, page_table.stride(0))
    return out


@functools.cache
def _prepared(q_stride: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, config: DecodeConfig) -> Callable[..., None]:
    group = num_heads // num_kv_heads
    padded_group, padded_dim = next_power_of_2(group), max(16, next_power_of_2(head_dim))
    is_tiled = config.has_tiles(head_dim, page_size)
    is_swapped = is_tiled and config.form == "swapped"
    return _decode_kernel.prepare(
        Q_STRIDE=q_stride,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        CHUNK_SIZE=config.chunk,
        BLOCK_N=config.block_n,
        BLOCK_G=max(8 if is_swapped else 16, padded_group),
        BLOCK_D=padded_dim,
        COMBINE_HEADS=padded_group,
        COMBINE_ROWS=max(2, COMBINE_ELEMENTS // (padded_group * padded_dim)),
        SCALE=softmax_scale(head_dim),
        STAGES=config.num_stages,
        IS_TILED=is_tiled,
        IS_SWAPPED=is_swapped,
        num_warps=config.num_warps,
        maxnreg=registers_for(config.num_warps, config.programs_per_sm),
        **pdl_options(),
    )


@triton.jit
def _combine(
    partial_acc,
    partial_lse,
    out,
    first,
    num_chunks,
    head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add a row's partial results in the order of its chunks; `out` points at the row's first query head of this KV head."""
    dims = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, HEADS)
    is_used = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = tl.minimum(heads, GROUP - 1)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for start in range(0, num_chunks, ROWS):
        chunks = start + tl.arange(0, ROWS)
        is_there = chunks < num_chunks
        places = ((first + chunks) * NUM_KV_HEADS + head)[:, None].to(tl.int64) * GROUP + heads[None, :]
        # .cg: the partial results come from other multiprocessors, past this one's first-level cache
        lse = tl.load(partial_lse + places, mask=is_there[:, None], other=float("-inf"), cache_modifier=".cg")
        values = partial_acc + places[:, :, None] * HEAD_DIM + dims[None, None, :]
        part = tl.load(values, mask=is_there[:, None, None] & is_used[None, :, :], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink[:, None] + tl.sum(part * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    tl.store(out + heads[:, None] * HEAD_DIM + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=is_used)


@Launcher
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "slots", "lengths", "first_partials", "items", "num_items", "counters"],
)
def _decode_kernel(  # noqa: PLR0915 - one loop over state that lives in registers
    q,
    k_pool,
    v_pool,
    k_tiles,
    v_tiles,
    out,
    table,
    slots,
    lengths,
    first_partials,
    items,
    num_items,
    partial_acc,
    partial_lse,
    counters,
    table_stride,
    Q_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMBINE_HEADS: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_TILED: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    PAGE_STRIDE: tl.constexpr = NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    is_used = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    in_head = heads[None, :] * HEAD_DIM + dims[:, None] if IS_SWAPPED else heads[:, None] * HEAD_DIM + dims[None, :]
    # What the next item says is read before the current one is worked on, and what it leads to before the current one's results are
    # written; the first even before the number of items is known (the grid is no larger than the list). One row's step is little more
    # than these loads one after the other. The plan was copied before the step's first kernel, so these loads need not wait for
    # the kernel ahead of this one.
    begin = tl.program_id(0)
    row = tl.load(items + begin // NUM_KV_HEADS * 2)
    chunk = tl.load(items + begin // NUM_KV_HEADS * 2 + 1)
    num_work = tl.load(num_items) * NUM_KV_HEADS
    length = tl.load(lengths + row)
    first_partial = tl.load(first_partials + row)
    slot = tl.load(slots + row)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for work in range(begin, num_work, tl.num_programs(0)):
        head = work % NUM_KV_HEADS
        following = tl.minimum(work + tl.num_programs(0), num_work - 1) // NUM_KV_HEADS
        next_row = tl.load(items + following * 2)
        next_chunk = tl.load(items + following * 2 + 1)
        pages = table + slot.to(tl.int64) * table_stride
        q_places = row.to(tl.int64) * Q_STRIDE + head * (GROUP * HEAD_DIM) + in_head
        queries = tl.load(q + q_places, mask=tl.trans(is_used) if IS_SWAPPED else is_used, other=0.0)
        end = tl.minimum(chunk * CHUNK_SIZE + CHUNK_SIZE, length)
        if IS_TILED:
            top, total, acc = attend_tiles(
                queries,
                k_pool,
                v_pool,
                k_tiles,
                v_tiles,
                pages,
                head,
                chunk * CHUNK_SIZE,
                end,
                NUM_KV_HEADS,
                HEAD_DIM,
                PAGE_SIZE,
                BLOCK_N,
                SCALE,
                STAGES,
                IS_SWAPPED,
            )
            if IS_SWAPPED:
                acc = tl.trans(acc)
        else:
            state = tl.full([BLOCK_G], float("-inf"), tl.float32), tl.zeros([BLOCK_G], tl.float32), tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            in_page = head * (PAGE_SIZE * HEAD_DIM)
            top, total, acc = attend(
                state,
                queries,
                tl.zeros([BLOCK_G], tl.int32) + (end - 1),
                k_pool + in_page,
                v_pool + in_page,
                pages,
                chunk * CHUNK_SIZE,
                end,
                end - 1,
                PAGE_STRIDE,
                HEAD_DIM,
                PAGE_SIZE,
                BLOCK_N,
                BLOCK_D,
                SCALE,
                STAGES,
                True,
            )
        next_length = tl.load(lengths + next_row)
        next_first_partial = tl.load(first_partials + next_row)
        next_slot = tl.load(slots + next_row)
        acc = acc / total[:, None]
        out_head = out + (row.to(tl.int64) * NUM_KV_HEADS + head) * (GROUP * HEAD_DIM)
        if first_partial < 0:
            tl.store(out_head + heads[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=is_used)
        else:
            place = ((first_partial + chunk).to(tl.int64) * NUM_KV_HEADS + head) * GROUP + heads
            tl.store(partial_acc + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_used)
            tl.store(partial_lse + place, top + tl.log2(total), mask=heads < GROUP)
            tl.debug_barrier()  # all threads have written before one of them announces it
            arrived = tl.atomic_add(counters + row * NUM_KV_HEADS + head, 1, sem="acq_rel")
            num_chunks = tl.cdiv(length, CHUNK_SIZE)
            if arrived == num_chunks - 1:
                _combine(
                    partial_acc,
                    partial_lse,
                    out_head,
                    first_partial,
                    num_chunks,
                    head,
                    NUM_KV_HEADS,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_D,
                    COMBINE_HEADS,
                    COMBINE_ROWS,
                )
                tl.store(counters + row * NUM_KV_HEADS + head, 0)
        row = next_row
        chunk = next_chunk
        length = next_length
        first_partial = next_first_partial
        slot = next_slot
