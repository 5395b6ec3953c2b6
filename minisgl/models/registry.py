"""The architectures we serve: one row each, saying how it differs from the common decoder. Adding one that fits is adding a row
(docs/adding-a-model.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture differs from a Llama without biases."""

    model_type: str
    """`model_type` in config.json, for a config without `architectures`"""
    has_qkv_bias: bool = False
    """always biased q, k and v"""
    reads_attention_bias: bool = False
    """`attention_bias` in the config adds biases to q, k, v and o"""
    reads_mlp_bias: bool = False
    """`mlp_bias` in the config adds biases to the MLP"""
    has_qk_norm: bool = False
    """RMSNorm over each head of q and k before rotation"""
    is_moe: bool = False
    window: Literal["always", "with_flag", "with_flag_by_layer"] = "with_flag"
    """when `sliding_window` counts: always, with `use_sliding_window`, or with it and from layer `max_window_layers` on"""
    default_window: int | None = None
    """what a config without `sliding_window` means where it counts, in tokens"""
    is_tied_by_default: bool = False
    """what a config without `tie_word_embeddings` means"""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Architecture("mistral", window="always", default_window=4096),
    "Qwen2ForCausalLM": Architecture("qwen2", has_qkv_bias=True, window="with_flag_by_layer", default_window=4096),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", reads_attention_bias=True, has_qk_norm=True, window="with_flag_by_layer", default_window=4096
    ),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", reads_attention_bias=True, has_qk_norm=True, is_moe=True, default_window=4096),
}
