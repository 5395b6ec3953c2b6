"""The decoder-only transformer that all supported architectures are, computed over one step's tokens.

Knows its configuration and the Context of a step; no requests, no scheduler, no checkpoint files. Called by the engine.

Letters: T tokens, S sampled rows, V vocabulary, D head dim.
"""

from __future__ import annotations

import torch

from minisgl.core import Context
from minisgl.layers.attention import SelfAttention
from minisgl.layers.base import BaseOP, OPList, Spec
from minisgl.layers.embedding import LMHead, VocabEmbedding
from minisgl.layers.mlp import GatedMLP, SparseMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary
from minisgl.models.config import ModelConfig

__all__ = ["CausalLM"]


class DecoderLayer(BaseOP):
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: ModelConfig, layer: int, spec: Spec) -> None:
        self.self_attn = SelfAttention(config.attention, layer, spec)
        if config.moe is not None and config.moe.is_sparse(layer):
            self.mlp: GatedMLP | SparseMLP = SparseMLP(config.hidden_size, config.moe, spec)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.has_mlp_bias, spec)
        self.input_layernorm = RMSNorm(config.hidden_size, config.attention.rms_norm_eps, spec)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.attention.rms_norm_eps, spec)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` is what the previous layer adds to `residual`; so is the first of what is returned. Both [T, hidden]."""
        x, residual = self.self_attn.forward(x, residual, self.input_layernorm, cos_sin, context)
        return self.mlp.forward(x, residual, self.post_attention_layernorm, context)


class Decoder(BaseOP):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, spec: Spec) -> None:
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, spec)
        self.layers = OPList([DecoderLayer(config, layer, spec) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.attention.rms_norm_eps, spec)
        self._rotary = Rotary(config.rope, spec.device)

    def tabulate(self, num_positions: int, dtype: torch.dtype) -> None:
        """Look the angles of positions below `num_positions` up from now on."""
        self._rotary.tabulate(num_positions, dtype)

    def forward(self, ids: torch.Tensor, rows: torch.Tensor | None, context: Context) -> torch.Tensor:
        """ids int64 [T], rows int64 [S] -> normed hidden states [S, hidden] of those tokens; None: of all."""
        residual = self.embed_tokens.forward(ids, context)
        cos_sin = self._rotary.cos_sin(context.positions, residual.dtype)
        x = torch.zeros_like(residual)
        for layer in self.layers:
            x, residual = layer.forward(x, residual, cos_sin, context)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return self.norm.forward_add(x, residual)[0]


class CausalLM(BaseOP):
    """A decoder with its LM head. `state_dict` gives the checkpoint's names; a tied head has none of its own."""

    def __init__(self, config: ModelConfig, spec: Spec) -> None:
        self.model = Decoder(config, spec)
        tied = self.model.embed_tokens if config.is_tied else None
        self._is_tied = config.is_tied
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, spec, tied)

    def num_bytes(self, is_packed: bool) -> int:
        """Bytes of the parameters, before they are packed; `is_packed` adds the copy of a tied embedding that is made then."""
        parameters = [*self.state_dict().values(), *([self.model.embed_tokens.weight] if self._is_tied and is_packed else [])]
        return sum(tensor.numel() * tensor.element_size() for tensor in parameters)

    def forward(self, ids: torch.Tensor, rows: torch.Tensor, context: Context) -> torch.Tensor:
        """Token ids int64 [T], indices int64 [S] of the tokens whose logits are wanted -> logits [S, V]."""
        return self.lm_head.forward(self.model.forward(ids, rows, context), context)
