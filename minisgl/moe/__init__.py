"""Mixture-of-experts backends by name: how the chosen experts of each token are computed and summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minisgl.errors import ConfigError
from minisgl.kernel import reference

if TYPE_CHECKING:
    import torch

    ExpertsFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

__all__ = ["MOE_BACKENDS", "experts_function"]

MOE_BACKENDS: dict[str, ExpertsFunction] = {"torch": reference.experts}


def experts_function(name: str) -> ExpertsFunction:
    """The function with `kernel.reference.experts`' signature called `name`; ConfigError with the list for an unknown one."""
    if name not in MOE_BACKENDS:
        raise ConfigError(f"MoE backend {name}: known are {', '.join(sorted(MOE_BACKENDS))}")
    return MOE_BACKENDS[name]
