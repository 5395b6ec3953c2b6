"""Feed-forward layers: gated, and mixtures of gated experts.

Letters: T tokens, E experts, I intermediate width of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.core import Context
from minisgl.layers.base import BaseOP, Spec
from minisgl.layers.linear import FusedLinear, Linear, RowLinear, divide
from minisgl.layers.norm import RMSNorm
from minisgl.moe import default_moe_backend

__all__ = ["GatedMLP", "MoEConfig", "SparseMLP"]


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Sizes of a mixture of experts, and in which layers it stands."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    is_renormalised: bool
    """norm_topk_prob: the chosen experts' weights sum to 1"""
    sparse_step: int
    """decoder_sparse_step: every n-th layer is sparse"""
    dense_layers: frozenset[int]
    """mlp_only_layers"""

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


class GatedMLP(BaseOP):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int, has_bias: bool, spec: Spec) -> None:
        size = divide(intermediate_size, spec.tp.size, "MLP columns")
        self._gate_up = FusedLinear(hidden_size, {"gate_proj": size, "up_proj": size}, has_bias, spec)
        self.down_proj = RowLinear(size, hidden_size, has_bias, spec)

    def state_dict(self, *, prefix: str = "", result: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        return super().state_dict(prefix=prefix, result=self._gate_up.state_dict(prefix=prefix, result=result))

    def forward(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """(the layer of norm(x + residual), x + residual); all [T, hidden]"""
        hidden, residual = self._gate_up.forward_normed(x, residual, norm, is_gated=True)
        return self.down_proj.forward(hidden, context), residual


class SparseMLP(BaseOP):
    """Each token's k likeliest experts, weighted by the router. Every rank holds a slice of every expert."""

    def __init__(self, hidden_size: int, config: MoEConfig, spec: Spec) -> None:
        size = divide(config.intermediate_size, spec.tp.size, "expert columns")
        self.gate = Linear(hidden_size, config.num_experts, False, spec)
        self._gate_up = spec.empty(config.num_experts, 2 * size, hidden_size)
        self._down = spec.empty(config.num_experts, hidden_size, size)
        self._config = config
        self._backend = default_moe_backend(spec.device)

    def state_dict(self, *, prefix: str = "", result: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        result = super().state_dict(prefix=prefix, result=result)
        size = self._down.shape[2]
        for expert in range(self._config.num_experts):
            own = f"{prefix}experts.{expert}."
            result[own + "gate_proj.weight"] = self._gate_up[expert, :size]
            result[own + "up_proj.weight"] = self._gate_up[expert, size:]
            result[own + "down_proj.weight"] = self._down[expert]
        return result

    def forward(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """(the layer of norm(x + residual), x + residual); all [T, hidden]"""
        x, residual = norm.forward_add(x, residual)
        weights, ids = self._backend.route(self.gate.forward(x), self._config.num_experts_per_token, self._config.is_renormalised)
        total: torch.Tensor = context.comm.all_reduce(self._backend.experts(x, self._gate_up, self._down, weights, ids))
        return total, residual
