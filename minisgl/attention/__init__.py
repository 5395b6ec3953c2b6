"""Attention backends by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.attention.base import BaseAttentionBackend
from minisgl.attention.torch_backend import TorchAttention
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVPool

if TYPE_CHECKING:
    import torch

__all__ = ["ATTENTION_BACKENDS", "BaseAttentionBackend", "TorchAttention", "make_attention_backend"]

ATTENTION_BACKENDS: dict[str, type[BaseAttentionBackend]] = {"torch": TorchAttention}


def make_attention_backend(name: str, pool: KVPool, page_table: torch.Tensor) -> BaseAttentionBackend:
    """The backend called `name`; `auto` takes the fastest usable one. Raises ConfigError with the list for an unknown name."""
    chosen = "torch" if name == "auto" else name
    if chosen not in ATTENTION_BACKENDS:
        raise ConfigError(f"--attention-backend {name}: known are auto, {', '.join(sorted(ATTENTION_BACKENDS))}")
    return ATTENTION_BACKENDS[chosen](pool, page_table)
