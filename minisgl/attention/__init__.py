"""Attention backends by name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from minisgl.attention.base import BaseAttentionBackend, PhasedAttention
from minisgl.attention.torch_backend import TorchAttention
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVPool

if TYPE_CHECKING:
    import torch

__all__ = ["ATTENTION_BACKENDS", "BaseAttentionBackend", "TorchAttention", "choose_attention_backends", "make_attention_backend"]


def _triton(pool: KVPool, page_table: torch.Tensor) -> BaseAttentionBackend:
    """Our kernels, imported here: a process on a CPU never loads triton."""
    if pool.k.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"--attention-backend triton: the device is {pool.k.device.type}; it needs cuda. On a CPU use torch")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--attention-backend triton: triton is not installed; run `pip install triton`, or use torch")
    from minisgl.attention.triton_backend import TritonAttention

    return TritonAttention(pool, page_table)


def _flash(pool: KVPool, page_table: torch.Tensor) -> BaseAttentionBackend:
    _refuse_for_library("fa", pool)
    if pool.page_size > LARGEST_FLASH_PAGE:
        raise ConfigError(
            f"--attention-backend fa: --page-size {pool.page_size} found, at most {LARGEST_FLASH_PAGE} is allowed: larger pages are read "
            "whole, with what an earlier owner left there, which may be no number"
        )
    import torch

    from minisgl.attention.flash_backend import FlashAttention, load_flash_attention

    return FlashAttention(pool, page_table, load_flash_attention(torch.cuda.get_device_capability(pool.k.device)[0]))


def _flashinfer(pool: KVPool, page_table: torch.Tensor) -> BaseAttentionBackend:
    _refuse_for_library("fi", pool)
    from minisgl.attention.flashinfer_backend import FlashInferAttention, load_flashinfer

    return FlashInferAttention(pool, page_table, load_flashinfer())


def _refuse_for_library(name: str, pool: KVPool) -> None:
    if pool.k.device.type != "cuda":
        raise ConfigError(f"--attention-backend {name}: the device is {pool.k.device.type}; it needs cuda. On a CPU use torch")
    if pool.k.element_size() != 2:
        dtype = str(pool.k.dtype).removeprefix("torch.")
        raise ConfigError(f"--attention-backend {name}: K/V is {dtype}; it takes bfloat16 and float16. Set --dtype, or use triton")


LARGEST_FLASH_PAGE = 64
"""Tokens; FlashAttention loads a page that holds a whole tile of keys (80 of them or more) in one go, rows beyond the length included."""
ATTENTION_BACKENDS: dict[str, Callable[[KVPool, torch.Tensor], BaseAttentionBackend]] = {
    "torch": TorchAttention,
    "triton": _triton,
    "fa": _flash,
    "fi": _flashinfer,
}


def choose_attention_backends(name: str, device_type: str) -> tuple[str, str]:
    """The backends of prefill and decode that `name` means: one name for both, or two with a comma between them. `auto` is triton on a CUDA
    device, torch elsewhere.

    Raises ConfigError for an unknown name, with the list.
    """
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 2:
        raise ConfigError(f"--attention-backend {name}: {len(parts)} names found; one for both phases is allowed, or two: PREFILL,DECODE")
    for part in parts:
        if part not in ("auto", *ATTENTION_BACKENDS):
            raise ConfigError(f"--attention-backend {name}: {part!r} is unknown; known are auto, {', '.join(sorted(ATTENTION_BACKENDS))}")
    fastest = "triton" if device_type == "cuda" else "torch"
    prefill, decode = (fastest if part == "auto" else part for part in (parts[0], parts[-1]))
    return prefill, decode


def make_attention_backend(name: str, pool: KVPool, page_table: torch.Tensor) -> BaseAttentionBackend:
    """What `name` means, see `choose_attention_backends`. Raises ConfigError for a backend that cannot run here, with the reason."""
    prefill, decode = choose_attention_backends(name, pool.k.device.type)
    decoding = ATTENTION_BACKENDS[decode](pool, page_table)
    return decoding if prefill == decode else PhasedAttention(ATTENTION_BACKENDS[prefill](pool, page_table), decoding)
