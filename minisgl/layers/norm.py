"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.kernel import reference
from minisgl.layers.base import BaseOP, Spec

__all__ = ["RMSNorm"]


class RMSNorm(BaseOP):
    """Scales the last dimension to root mean square 1, then by a learned gain."""

    def __init__(self, size: int, eps: float, spec: Spec) -> None:
        self.weight = spec.empty(size)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:  # one operation; half types round before the gain is applied, which it does not
            return F.rms_norm(x, self.weight.shape, self.weight, self._eps)
        return reference.rms_norm(x, self.weight, self._eps)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)"""
        total = residual + x
        return self.forward(total), total
