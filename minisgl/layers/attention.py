"""Self-attention: projections, optional q/k norm, rotation, and the backend's paged attention.

Letters: T tokens, H query heads and K KV heads of this rank, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.core import Context
from minisgl.errors import ConfigError
from minisgl.kernel import reference
from minisgl.kernel.dispatch import kernels_for
from minisgl.layers.base import BaseOP, Spec
from minisgl.layers.linear import FusedLinear, RowLinear, divide
from minisgl.layers.norm import RMSNorm

__all__ = ["AttentionConfig", "SelfAttention", "local_kv_heads"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes of a model's attention, of all ranks together."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    has_output_bias: bool
    has_qk_norm: bool
    rms_norm_eps: float


def local_kv_heads(num_kv_heads: int, size: int) -> int:
    """KV heads of each rank: an even share, or one replica where there are fewer heads than ranks."""
    if num_kv_heads >= size:
        return divide(num_kv_heads, size, "KV heads")
    if size % num_kv_heads:
        raise ConfigError(f"{num_kv_heads} KV heads over {size} ranks: with fewer heads than ranks, --tp must be a multiple of the heads")
    return 1


class SelfAttention(BaseOP):
    """One layer's attention."""

    def __init__(self, config: AttentionConfig, layer: int, spec: Spec) -> None:
        self._layer = layer
        self._num_heads = divide(config.num_heads, spec.tp.size, "attention heads")
        self._num_kv_heads = local_kv_heads(config.num_kv_heads, spec.tp.size)
        self._head_dim = config.head_dim
        q_size, kv_size = self._num_heads * config.head_dim, self._num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = FusedLinear(config.hidden_size, parts, config.has_qkv_bias, spec)
        self.o_proj = RowLinear(q_size, config.hidden_size, config.has_output_bias, spec)
        self._has_qk_norm = config.has_qk_norm
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, spec)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, spec)
        self._rope_and_store = kernels_for(spec.device).rope_and_store

    def state_dict(self, *, prefix: str = "", result: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        return super().state_dict(prefix=prefix, result=self._qkv.state_dict(prefix=prefix, result=result))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, cos_sin: tuple[torch.Tensor, torch.Tensor], context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the layer of norm(x + residual), x + residual); all [T, hidden]. cos and sin are [T, D/2]."""
        qkv, residual = self._qkv.forward_normed(x, residual, norm)
        if self._rope_and_store is not None and context.attention.takes_stored_kv:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self._has_qk_norm else None
            k_pool, v_pool = context.attention.pool.k[self._layer], context.attention.pool.v[self._layer]
            q = self._rope_and_store(qkv, *cos_sin, norms, k_pool, v_pool, context.metadata.write_slots)
            out = context.attention.attend(q, self._layer, context.metadata)
        else:
            out = context.attention.forward(*self._turned(qkv, cos_sin), self._layer, context.metadata)
        return self.o_proj.forward(out.reshape(len(x), -1), context), residual

    def _turned(self, qkv: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, q and k normed and rotated; [T, heads, D] each."""
        num_turned = self._num_heads + self._num_kv_heads
        heads = qkv.view(len(qkv), num_turned + self._num_kv_heads, self._head_dim)
        turned, v = heads[:, :num_turned], heads[:, num_turned:]
        if self._has_qk_norm:
            q, k = self.q_norm.forward(turned[:, : self._num_heads]), self.k_norm.forward(turned[:, self._num_heads :])
            turned = torch.cat((q, k), dim=1)
        turned = reference.apply_rope(turned, *cos_sin)
        return turned[:, : self._num_heads], turned[:, self._num_heads :], v
