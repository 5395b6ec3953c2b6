"""Log probabilities of raw logits, in fp32, before bias, penalties and temperature.

Knows tensors and ids only. Called by the engine.

Letters: N rows, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl.core import TokenLogprobs
from minisgl.kernel.staging import Pending, Readback

__all__ = ["PROMPT_LOGITS", "Logprobs", "PendingLogprobs", "compute_logprobs", "read_back"]

PROMPT_LOGITS = 256
"""Prompt tokens whose logits are computed together."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities on the device."""

    packed: torch.Tensor
    """int32 [N, 2 + 2K]: the token that was taken, the bits of its fp32 log probability, the likeliest first, the bits of theirs"""
    num_top: list[int]
    """[N] how many of the likeliest each row wants, at most K"""


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log probabilities on their way to the host."""

    numbers: Pending
    """of the pieces one after the other"""
    pieces: Sequence[Logprobs]

    def read(self) -> list[TokenLogprobs]:
        """Wait for them; one entry per row of each piece. Called once."""
        numbers, entries, start = self.numbers.read(), [], 0
        for piece in self.pieces:
            table = numbers[start : start + piece.packed.numel()].reshape(len(piece.num_top), -1)
            start += table.size
            middle = 2 + (table.shape[1] - 2) // 2
            values = table.view("float32")
            columns = (table[:, 0], values[:, 1], table[:, 2:middle], values[:, middle:])
            for token, taken, ids, top, count in zip(*(column.tolist() for column in columns), piece.num_top, strict=True):
                entries.append(TokenLogprobs(token, _finite(taken), tuple(ids[:count]), tuple(map(_finite, top[:count]))))
        return entries


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> Logprobs:
    """logits [N, V], token_ids int64 [N] -> log probabilities of those tokens and of as many of the likeliest as each row wants."""
    logprobs = logits.float().log_softmax(-1)
    taken = logprobs.gather(1, token_ids.unsqueeze(1))
    top = logprobs.topk(min(max(num_top), logits.shape[1]), dim=-1)
    parts = (token_ids.unsqueeze(1).int(), taken.view(torch.int32), top.indices.int(), top.values.view(torch.int32))
    return Logprobs(torch.cat(parts, dim=1), num_top)


def read_back(pieces: Sequence[Logprobs], readback: Readback) -> PendingLogprobs | None:
    """Begin to copy all pieces to the host, in one go; None if there are none."""
    if not pieces:
        return None
    return PendingLogprobs(readback.start(torch.cat([piece.packed.reshape(-1) for piece in pieces])), pieces)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
