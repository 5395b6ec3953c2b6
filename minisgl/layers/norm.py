"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from minisgl.kernel.dispatch import kernels_for
from minisgl.layers.base import BaseOP, Spec

__all__ = ["RMSNorm"]


class RMSNorm(BaseOP):
    """Scales the last dimension to root mean square 1, then by a learned gain."""

    def __init__(self, size: int, eps: float, spec: Spec) -> None:
        self.weight = spec.empty(size)
        self._eps = eps
        self._kernels = kernels_for(spec.device)

    @property
    def eps(self) -> float:
        return self._eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)"""
        return self._kernels.add_rms_norm(x, residual, self.weight, self._eps)
