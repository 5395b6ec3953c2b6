"""Attention by FlashAttention, whichever of its packages is installed: of FlashAttention 3 or the CuTe DSL one (4).

The libraries want [pages, page_size, K, D]: they get a strided view of the pool. Both phases are one call, a ragged batch of new tokens
over paged K/V. Decode steps are no CUDA graphs. Imported only where this backend is asked for.

Letters: T new tokens, B rows, H query heads, K KV heads, D head dim, P pages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.attention.base import BaseAttentionBackend
from minisgl.core import Batch
from minisgl.errors import ConfigError
from minisgl.kernel.staging import Uploader
from minisgl.kvcache.pool import KVPool

__all__ = ["FlashAttention", "FlashMetadata", "load_flash_attention"]

INSTALL = "run `pip install --pre flash-attn-4`"


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """One step on the device, for all layers."""

    write_slots: torch.Tensor
    """int32 [T], page * page_size + offset that takes a new token's K/V"""
    starts: torch.Tensor
    """int32 [B + 1], where each row's new tokens begin, and T"""
    lengths: torch.Tensor
    """int32 [B], tokens of each row after this step"""
    pages: torch.Tensor
    """int32 [B, most pages of a row]"""
    most_new: int
    """new tokens of the row that has most"""


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FlashMetadata], torch.Tensor]
"""q [T, H, D]; K and V [P, page_size, K, D]; the step -> [T, H, D]"""


class FlashAttention(BaseAttentionBackend):
    """Paged attention by a library."""

    takes_stored_kv = True

    def __init__(self, pool: KVPool, page_table: torch.Tensor, library: tuple[str, Attend]) -> None:
        """`library`: what `load_flash_attention` gives."""
        super().__init__(pool, page_table)
        name, self._attend = library
        self.description = f"fa ({name})"
        self._upload = Uploader(pool.k.device)

    def prepare(self, batch: Batch) -> FlashMetadata:
        lengths = batch.cached_lens + batch.extend_lens
        starts = np.concatenate(([0], np.cumsum(batch.extend_lens))).astype(np.int32)
        write_slots, slots, lengths_there, starts_there = self._upload(batch.write_slots, batch.slots, lengths, starts)
        num_pages = -(-int(lengths.max()) // self.pool.page_size)
        pages = self.page_table[:, :num_pages][slots.long()]
        return FlashMetadata(write_slots, starts_there, lengths_there, pages, int(batch.extend_lens.max()))

    def attend(self, q: torch.Tensor, layer: int, metadata: FlashMetadata) -> torch.Tensor:
        k, v = (pool[layer].transpose(1, 2) for pool in (self.pool.k, self.pool.v))
        return self._attend(q, k, v, metadata)


def load_flash_attention(capability: int) -> tuple[str, Attend]:
    """The first package that can be imported and has kernels for GPUs of compute capability `capability`.x, and its name.

    Raises ConfigError with what each one said, and how to install one.
    """
    reasons = []
    for name, bind, capabilities in (
        ("flash_attn_interface", _bind_3, (8, 9)),
        ("sgl_kernel.flash_attn", _bind_3, (8, 9)),
        ("flash_attn.cute", _bind_4, (9, 10, 11)),
    ):
        if capability not in capabilities:
            reasons.append(f"{name} (has no paged kernels for compute capability {capability}.x)")
            continue
        try:
            return name, bind(importlib.import_module(name))
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # not there, or not for this torch
            reasons.append(f"{name} ({error})")
    raise ConfigError(f"--attention-backend fa: no FlashAttention can be imported: {'; '.join(reasons)}; {INSTALL}, or use triton")


def _bind_3(module: Any) -> Attend:
    function = module.flash_attn_with_kvcache

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: FlashMetadata) -> torch.Tensor:
        rows = {"cu_seqlens_q": step.starts, "max_seqlen_q": step.most_new, "cache_seqlens": step.lengths}
        out: torch.Tensor = function(q, k, v, page_table=step.pages, causal=True, **rows)
        return out

    return attend


def _bind_4(module: Any) -> Attend:
    function = module.flash_attn_varlen_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: FlashMetadata) -> torch.Tensor:
        rows = {"cu_seqlens_q": step.starts, "max_seqlen_q": step.most_new, "seqused_k": step.lengths}
        out: torch.Tensor = function(q, k, v, page_table=step.pages, causal=True, **rows)[0]  # the log of the sums comes second
        return out

    return attend
