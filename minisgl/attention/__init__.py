"""Attention backends by name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from minisgl.attention.base import BaseAttentionBackend
from minisgl.attention.torch_backend import TorchAttention
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVPool

if TYPE_CHECKING:
    import torch

__all__ = ["ATTENTION_BACKENDS", "BaseAttentionBackend", "TorchAttention", "make_attention_backend"]


def _triton(pool: KVPool, page_table: torch.Tensor) -> BaseAttentionBackend:
    """Our kernels, imported here: a process on a CPU never loads triton."""
    if pool.k.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"--attention-backend triton: the device is {pool.k.device.type}; it needs cuda. On a CPU use torch")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--attention-backend triton: triton is not installed; run `pip install triton`, or use torch")
    from minisgl.attention.triton_backend import TritonAttention

    return TritonAttention(pool, page_table)


ATTENTION_BACKENDS: dict[str, Callable[[KVPool, torch.Tensor], BaseAttentionBackend]] = {"torch": TorchAttention, "triton": _triton}


def make_attention_backend(name: str, pool: KVPool, page_table: torch.Tensor) -> BaseAttentionBackend:
    """The backend called `name`; `auto` is triton on a CUDA device, torch elsewhere.

    Raises ConfigError for an unknown name, with the list, and for a backend that cannot run here.
    """
    chosen = ("triton" if pool.k.device.type == "cuda" else "torch") if name == "auto" else name
    if chosen not in ATTENTION_BACKENDS:
        raise ConfigError(f"--attention-backend {name}: known are auto, {', '.join(sorted(ATTENTION_BACKENDS))}")
    return ATTENTION_BACKENDS[chosen](pool, page_table)
