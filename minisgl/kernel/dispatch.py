"""Which implementation of each small operation serves a device: the plain-torch twins, or the Triton kernels on a GPU.

Knows tensors only. Called by the layers, once, when they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minisgl.kernel import reference

__all__ = ["FewRows", "Kernels", "kernels_for"]

Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class FewRows:
    """Matrix products of few rows; see `kernel.gpu.linear`."""

    is_faster: Callable[[int, int, bool], bool]
    """whether they beat the library's for so many tokens and inputs, and with a norm before or without"""
    linear: Callable[..., torch.Tensor]
    norm_linear: Callable[..., Tensors]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Operations with the signatures and the meaning of their twins in `kernel.reference`."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Tensors]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    vocab_embedding: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    rope_and_store: Callable[..., torch.Tensor] | None = None
    """norms of q and k, rotation and the writing of K and V in one; None where each is an operation of its own"""
    few_rows: FewRows | None = None
    """products that read the matrix once, for steps of few tokens; None where the library's are the fastest"""


def kernels_for(device: torch.device) -> Kernels:
    """The fastest that run on `device`."""
    if device.type == "cuda":
        from minisgl.kernel.gpu import activation, embedding, linear, norm, rope

        few_rows = FewRows(linear.is_faster, linear.linear, linear.norm_linear)
        small = (norm.rms_norm, norm.add_rms_norm, activation.silu_mul, embedding.vocab_embedding)
        return Kernels(*small, rope.rope_and_store, few_rows)
    return Kernels(_rms_norm, _add_rms_norm, _silu_mul, _vocab_embedding)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One operation for float32; half types round before the gain is applied, which torch's own function does not."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return reference.rms_norm(x, weight, eps)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Tensors:
    total = residual + x
    return _rms_norm(total, weight, eps), total


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin as it is when it is called: tests put a wrong one in its place."""
    return reference.silu_mul(gate_up)


def _vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, first_id: int) -> torch.Tensor:
    return reference.vocab_embedding(ids, weight, first_id)
