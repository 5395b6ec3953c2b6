"""Mixture-of-experts backends by name: how each token's experts are chosen, computed and summed.

Knows tensors only. Called by the sparse layers when they are made, and by the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl.errors import ConfigError
from minisgl.kernel import reference

__all__ = ["MOE_BACKENDS", "MoEBackend", "default_moe_backend", "moe_backend"]


@dataclass(frozen=True, slots=True)
class MoEBackend:
    """Two operations with the signatures and the meaning of their twins in `kernel.reference`."""

    route: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    supports_graphs: bool
    """whether nothing waits for the device, so that CUDA graphs can hold them"""


def _torch() -> MoEBackend:
    return MoEBackend(reference.route, reference.experts, supports_graphs=False)


def _triton() -> MoEBackend:
    from minisgl.kernel.gpu import moe

    return MoEBackend(moe.route, moe.experts, supports_graphs=True)


MOE_BACKENDS: dict[str, Callable[[], MoEBackend]] = {"torch": _torch, "triton": _triton}


def moe_backend(name: str) -> MoEBackend:
    """The backend called `name`; ConfigError with the list for an unknown one."""
    if name not in MOE_BACKENDS:
        raise ConfigError(f"MoE backend {name}: known are {', '.join(sorted(MOE_BACKENDS))}")
    return MOE_BACKENDS[name]()


def default_moe_backend(device: torch.device) -> MoEBackend:
    """The fastest that runs on `device`."""
    return moe_backend("triton" if device.type == "cuda" else "torch")
