"""Attention in plain torch: the CPU's backend, and the one that runs everywhere.

One gather per layer copies the pages of a group of rows into [rows, K, length, D]; the H / K query heads of a KV head then act as
further query positions of it, so that K and V are never repeated. Rows that compute one token form groups padded to their longest;
a row that computes several tokens is a group of its own.

Letters: T new tokens, B rows of a group, H query heads, K KV heads, G = H / K, N new tokens of a row, L padded length, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from minisgl.attention.base import BaseAttentionBackend
from minisgl.core import Batch, Int32Array
from minisgl.kernel.reference import kv_rows
from minisgl.kvcache.pool import KVPool

__all__ = ["TorchAttention"]

PADDING_WASTE = 1.5
"""A group of decode rows is split where the longest would be this many times the shortest."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are attended together: each computes `num_new` tokens."""

    tokens: torch.Tensor
    """int64 [B * N], indices into the step's tokens"""
    gather: torch.Tensor
    """int64 [B * K * pages], rows of the pool seen as [P * K, page_size * D]"""
    mask: torch.Tensor | None
    """bool [B or 1, 1, G * N or 1, L], True where a key is visible; None where every key is"""
    unused: tuple[torch.Tensor, torch.Tensor] | None
    """int64 (rows, keys) of gathered places beyond a row's length; None if there are none. They hold what an earlier owner left, which
    is set to zero: a mask hides numbers, but 0 * inf is not a number."""
    num_rows: int
    num_new: int


@dataclass(frozen=True, slots=True)
class _Metadata:
    write_rows: torch.Tensor
    """int64 [T * K], see `kv_rows`"""
    groups: tuple[_Group, ...]


class TorchAttention(BaseAttentionBackend):
    """`F.scaled_dot_product_attention` over gathered pages."""

    description = "torch"

    def __init__(self, pool: KVPool, page_table: torch.Tensor) -> None:
        super().__init__(pool, page_table)
        num_layers, head_dim = len(pool.k), pool.k.shape[-1]
        self._slots = [tuple(t[layer].view(-1, head_dim) for t in (pool.k, pool.v)) for layer in range(num_layers)]
        """per layer: K and V seen as rows [P * K * page_size, D], one per token and head"""
        self._pages = [tuple(t[layer].view(-1, pool.page_size * head_dim) for t in (pool.k, pool.v)) for layer in range(num_layers)]
        """per layer: K and V seen as rows [P * K, page_size * D], one per page and head"""

    def prepare(self, batch: Batch) -> _Metadata:
        cached, extend = batch.cached_lens, batch.extend_lens
        starts = np.cumsum(extend) - extend
        slots = self._to_device(batch.slots)
        after = cached + extend
        groups = [self._group(slots[rows], after[rows], starts[rows], int(extend[rows[0]])) for rows in _split_rows(cached, extend)]
        rows = kv_rows(self._to_device(batch.write_slots), self.pool.k.shape[2], self.pool.page_size)
        return _Metadata(rows, tuple(groups))

    def _to_device(self, array: Int32Array) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.pool.k.device)

    def _group(self, slots: torch.Tensor, lengths: Int32Array, starts: Int32Array, num_new: int) -> _Group:
        """One group: `slots` int64 [B], `lengths` (tokens after this step) and `starts` (first token in the step) int [B]."""
        device, page_size, num_kv_heads = slots.device, self.pool.page_size, self.pool.k.shape[2]
        longest = int(lengths.max())
        pages = self.page_table[slots, : -(-longest // page_size)].long()
        gather = pages.unsqueeze(1) * num_kv_heads + torch.arange(num_kv_heads, device=device).view(1, -1, 1)
        tokens = starts.astype(np.int64)[:, None] + np.arange(num_new)
        last_visible = lengths.astype(np.int64)[:, None] - num_new + np.arange(num_new)
        num_keys = pages.shape[1] * page_size
        mask = None
        if num_new > 1 or int(lengths.min()) < num_keys:
            limit = torch.from_numpy(last_visible).to(device).view(len(lengths), 1, num_new, 1)
            mask = torch.arange(num_keys, device=device) <= limit
        rows, keys = np.nonzero(np.arange(num_keys) >= lengths[:, None])
        unused = (torch.from_numpy(rows).to(device), torch.from_numpy(keys).to(device)) if len(rows) else None
        return _Group(torch.from_numpy(tokens.reshape(-1)).to(device), gather.reshape(-1), mask, unused, len(lengths), num_new)

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: int, metadata: _Metadata) -> None:
        for rows, new in zip(self._slots[layer], (k, v), strict=True):
            rows.index_copy_(0, metadata.write_rows, new.reshape(-1, new.shape[-1]))

    def attend(self, q: torch.Tensor, layer: int, metadata: _Metadata) -> torch.Tensor:
        if len(metadata.groups) == 1:
            return self._attend_group(q, layer, metadata.groups[0])
        out = torch.empty_like(q)
        for group in metadata.groups:
            out[group.tokens] = self._attend_group(q[group.tokens], layer, group)
        return out

    def _attend_group(self, q: torch.Tensor, layer: int, group: _Group) -> torch.Tensor:
        """q [B * N, H, D] of the group's tokens in order -> the same shape."""
        num_rows, num_new, num_heads, head_dim = group.num_rows, group.num_new, q.shape[1], q.shape[2]
        num_kv_heads = self.pool.k.shape[2]
        packed = num_heads // num_kv_heads
        k, v = (pages.index_select(0, group.gather).view(num_rows, num_kv_heads, -1, head_dim) for pages in self._pages[layer])
        if group.unused is not None:
            rows, keys = group.unused
            k[rows, :, keys] = 0
            v[rows, :, keys] = 0
        if num_new == 1:
            grouped = q.reshape(num_rows, num_kv_heads, packed, head_dim)
            return F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask).reshape(num_rows, num_heads, head_dim)
        grouped = q.view(num_rows, num_new, num_kv_heads, packed, head_dim).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(num_rows, num_kv_heads, packed * num_new, head_dim)
        mask = group.mask
        if mask is not None:
            mask = mask.unsqueeze(2).expand(-1, -1, packed, -1, -1).reshape(num_rows, 1, packed * num_new, -1)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
        out = out.view(num_rows, num_kv_heads, packed, num_new, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(num_rows * num_new, num_heads, head_dim)


def _split_rows(cached: Int32Array, extend: Int32Array) -> list[Int32Array]:
    """Row indices of each group: decode rows by similar length, then every other row alone."""
    groups: list[Int32Array] = []
    decode = np.flatnonzero(extend == 1)
    order = decode[np.argsort(cached[decode], kind="stable")]
    first = 0
    for index in range(1, len(order) + 1):
        if index == len(order) or cached[order[index]] + 1 > PADDING_WASTE * (cached[order[first]] + 64):
            # within a group rows keep the batch's order, so that a group of all rows needs no gather of q
            groups.append(np.sort(order[first:index]).astype(np.int32))
            first = index
    groups.extend(np.array([row], dtype=np.int32) for row in np.flatnonzero(extend > 1))
    return groups
