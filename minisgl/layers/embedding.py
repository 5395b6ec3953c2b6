"""The vocabulary at both ends: token ids to vectors, vectors to logits, cut over the ranks in blocks of ceil(V / n).

Letters: T tokens, V vocabulary, S sampled rows.
"""

from __future__ import annotations

import torch

from minisgl.core import Context
from minisgl.kernel.dispatch import kernels_for
from minisgl.kernel.packed import can_pack, pack, packed_linear
from minisgl.layers.base import BaseOP, Spec
from minisgl.layers.linear import linear

__all__ = ["LMHead", "VocabEmbedding", "vocab_block"]


def vocab_block(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """First id and one past the last of `rank`'s block; the last blocks may be short or empty."""
    block = -(-vocab_size // size)
    return min(rank * block, vocab_size), min((rank + 1) * block, vocab_size)


class VocabEmbedding(BaseOP):
    """Each rank looks up its own ids and the ranks' results are summed."""

    def __init__(self, vocab_size: int, hidden_size: int, spec: Spec) -> None:
        first, end = vocab_block(vocab_size, spec.tp.rank, spec.tp.size)
        self.weight = spec.empty(end - first, hidden_size)
        self._first = first
        self._is_cut = spec.tp.size > 1
        self._vocab_embedding = kernels_for(spec.device).vocab_embedding

    def forward(self, ids: torch.Tensor, context: Context) -> torch.Tensor:
        """int64 [T] -> [T, hidden]"""
        if not self._is_cut:
            return torch.nn.functional.embedding(ids, self.weight)
        rows: torch.Tensor = context.comm.all_reduce(self._vocab_embedding(ids, self.weight, self._first))
        return rows


class LMHead(BaseOP):
    """Logits over the whole vocabulary on every rank. Without a weight of its own (tied) it uses the embedding's."""

    def __init__(self, vocab_size: int, hidden_size: int, spec: Spec, tied: VocabEmbedding | None) -> None:
        first, end = vocab_block(vocab_size, spec.tp.rank, spec.tp.size)
        if tied is None:
            self.weight = spec.empty(end - first, hidden_size)
        self._tied = tied
        self._packed: torch.Tensor | None = None
        self._vocab_size = vocab_size
        self._block = -(-vocab_size // spec.tp.size)

    def pack(self) -> None:
        """A tied embedding is looked up by rows too, so the head packs a copy."""
        weight = self.weight if self._tied is None else self._tied.weight
        if len(weight) and can_pack(weight.dtype, weight.device):
            self._packed = pack(weight)
            if self._tied is None:
                del self.weight

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return packed_linear(hidden, self._packed)
        return linear(hidden, self.weight if self._tied is None else self._tied.weight)

    def forward(self, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        """[S, hidden] -> [S, V]"""
        if len(hidden) == 0:
            return hidden.new_empty((0, self._vocab_size))
        logits = self._product(hidden)
        if logits.shape[1] < self._block:
            logits = torch.nn.functional.pad(logits, (0, self._block - logits.shape[1]))
        blocks: torch.Tensor = context.comm.all_gather(logits)
        if blocks.shape[0] == 1:
            return blocks[0]
        return blocks.transpose(0, 1).reshape(len(hidden), -1)[:, : self._vocab_size]
