"""Log probabilities of raw logits, in fp32, before bias, penalties and temperature.

Knows tensors and ids only. Called by the engine.

Letters: N rows, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minisgl.core import TokenLogprobs

__all__ = ["Logprobs", "compute_logprobs"]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities on the device, not read yet."""

    token_ids: torch.Tensor
    """int64 [N] the token that was taken"""
    taken: torch.Tensor
    """fp32 [N]"""
    top_ids: torch.Tensor
    """int64 [N, K], likeliest first"""
    top: torch.Tensor
    """fp32 [N, K]"""

    def read(self, num_top: list[int]) -> list[TokenLogprobs]:
        """As values on the host, with the first `num_top[i]` likeliest tokens of row i."""
        columns = (self.token_ids.tolist(), self.taken.tolist(), self.top_ids.tolist(), self.top.tolist(), num_top)
        return [
            TokenLogprobs(token, _finite(taken), tuple(ids[:count]), tuple(map(_finite, values[:count])))
            for token, taken, ids, values, count in zip(*columns, strict=True)
        ]


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """logits [N, V], token_ids int64 [N] -> log probabilities of those tokens and of the `num_top` likeliest."""
    logprobs = logits.float().log_softmax(-1)
    taken = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return Logprobs(token_ids, taken, top.indices, top.values)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
