"""The loop that both attention kernels share: queries of one head against a run of paged keys, softmax carried along.

Knows tensors only. Called by `decode_attention` and `prefill_attention`.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have no Python types
# mypy: allow-untyped-decorators, disable-error-code="import-untyped,no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl

__all__ = ["attend", "attend_tiles", "registers_for", "softmax_scale"]

REGISTERS_PER_SM = 65_536
LOG2_E = 1.4426950408889634


def softmax_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim) for softmax by powers of two."""
    return LOG2_E / math.sqrt(head_dim)


def registers_for(num_warps: int, programs_per_sm: int) -> int:
    """Registers a thread may take so that so many programs are resident; a multiple of 8, as they are handed out."""
    return min(248, REGISTERS_PER_SM // (32 * num_warps * programs_per_sm) // 8 * 8)


@triton.jit
def _page_ids(table, first, last, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of tokens first, first + 1, ...: one number where a page holds the whole block, else int32 [BLOCK_N].

    `first` is a multiple of BLOCK_N, `table` points at the row's first page id. Tokens beyond `last` count as `last`.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table + tl.minimum(first, last) // PAGE_SIZE)
    else:
        return tl.load(table + tl.minimum(first + tl.arange(0, BLOCK_N), last) // PAGE_SIZE)


@triton.jit
def _kv_places(ids, first, last, PAGE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(base, [BLOCK_N]) whose sum says where K (or V) of tokens first, first + 1, ... starts in the pool, in elements.

    Tokens beyond `last` are read as `last`: no place is read that the row does not own, so nothing there can spoil a sum.
    """
    tokens = tl.minimum(first + tl.arange(0, BLOCK_N), last)
    if PAGE_SIZE % BLOCK_N == 0:
        return ids.to(tl.int64) * PAGE_STRIDE, (tokens - first // PAGE_SIZE * PAGE_SIZE) * HEAD_DIM
    else:
        return 0, ids.to(tl.int64) * PAGE_STRIDE + (tokens % PAGE_SIZE) * HEAD_DIM


@triton.jit
def attend(
    state,
    queries,
    positions,
    k_head,
    v_head,
    table,
    begin,
    end,
    last,
    PAGE_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Carry `state` (top score, sum of exponentials, weighted sum of V, per query) over keys begin..end-1.

    `queries` [M, BLOCK_D] see keys up to their `positions` [M], or all of them without a mask. `begin` is a multiple of BLOCK_N; `last`,
    the last token that is read, is end - 1 at least. Page ids are read one turn ahead, so that the loads of K and V can be pipelined.
    """
    top, total, acc = state
    dims = tl.arange(0, BLOCK_D)
    ids = _page_ids(table, begin, last, PAGE_SIZE, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        base, offsets = _kv_places(ids, first, last, PAGE_STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_N)
        ids = _page_ids(table, first + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        places = offsets[:, None] + dims[None, :]
        if BLOCK_D == HEAD_DIM:
            k = tl.load(k_head + base + places)
            v = tl.load(v_head + base + places)
        else:
            k = tl.load(k_head + base + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_head + base + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if IS_MASKED:
            is_visible = (first + tl.arange(0, BLOCK_N))[None, :] <= positions[:, None]
            scores = tl.where(is_visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * SCALE)
        weights = tl.exp2(scores * SCALE - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _turn(state, queries, k, v, first, last, SCALE: tl.constexpr, IS_SWAPPED: tl.constexpr, IS_MASKED: tl.constexpr):
    """Carry `state` over one tile of K and V [N, D] whose first token is `first`; a masked one sees tokens up to `last`.

    Sums of exponentials stay apart for each key of the tile, so that no turn adds across threads. Swapped, all is transposed: `queries`
    are [D, M] and keys take the rows of the scores.
    """
    top, total, acc = state
    keys: tl.constexpr = 0 if IS_SWAPPED else 1
    scores = tl.dot(k, queries, input_precision="ieee") if IS_SWAPPED else tl.dot(queries, tl.trans(k), input_precision="ieee")
    if IS_MASKED:
        is_visible = first + tl.arange(0, k.shape[0]) <= last
        scores = tl.where(tl.expand_dims(is_visible, 1 - keys), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, keys) * SCALE)
    weights = tl.exp2(scores * SCALE - tl.expand_dims(new_top, keys))
    shrink = tl.expand_dims(tl.exp2(top - new_top), keys)
    total = total * shrink + weights
    if IS_SWAPPED:
        acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * shrink, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def attend_tiles(
    queries,
    k_pool,
    v_pool,
    k_tiles,
    v_tiles,
    table,
    head,
    begin,
    end,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
):
    """(top score [M], sum of exponentials [M], weighted sum of V) of queries [M, HEAD_DIM] over keys begin..end-1, all of them visible.

    A page holds whole tiles of BLOCK_N tokens and `begin` starts one, so a full tile is one block of the pool: it needs no mask, and
    descriptors of the pool as [P * K * PAGE_SIZE, HEAD_DIM], if given, can fetch it. What is left is one tile that reads the last token
    in place of those beyond it. Swapped: `queries` and the weighted sum are [HEAD_DIM, M].
    """
    BLOCK_M: tl.constexpr = queries.shape[1] if IS_SWAPPED else queries.shape[0]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if IS_SWAPPED:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc = tl.zeros([HEAD_DIM, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    last = end - 1
    tokens = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    places = tokens[:, None] * HEAD_DIM + dims[None, :]
    full_end = end // BLOCK_N * BLOCK_N
    page = tl.load(table + begin // PAGE_SIZE)
    for first in tl.range(begin, full_end, BLOCK_N, num_stages=STAGES):
        place = (page * NUM_KV_HEADS + head) * PAGE_SIZE + first % PAGE_SIZE
        page = tl.load(table + tl.minimum(first + BLOCK_N, last) // PAGE_SIZE)
        if k_tiles is None:
            k = tl.load(k_pool + place.to(tl.int64) * HEAD_DIM + places)
            v = tl.load(v_pool + place.to(tl.int64) * HEAD_DIM + places)
        else:
            k = k_tiles.load([place, 0])
            v = v_tiles.load([place, 0])
        top, total, acc = _turn((top, total, acc), queries, k, v, first, last, SCALE, IS_SWAPPED, False)
    for first in tl.range(full_end, end, BLOCK_N, num_stages=2):  # one turn or none; 2: by way of shared memory
        place = ((page * NUM_KV_HEADS + head) * PAGE_SIZE + first % PAGE_SIZE).to(tl.int64) * HEAD_DIM
        places = tl.minimum(tokens, last - first)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_pool + place + places)
        v = tl.load(v_pool + place + places)
        top, total, acc = _turn((top, total, acc), queries, k, v, first, last, SCALE, IS_SWAPPED, True)
    return top, tl.sum(total, 0 if IS_SWAPPED else 1), acc
