"""The small base of all layers: tensors among an object's fields are its parameters.

Knows no checkpoint format and no device. The names that `state_dict` gives are the checkpoint's names; layers that fuse several
checkpoint tensors into one expose views of it under their old names, so that loading copies straight into place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from minisgl.distributed import DistributedInfo
from minisgl.errors import ModelFormatError

__all__ = ["BaseOP", "OPList", "Spec"]


@dataclass(frozen=True, slots=True)
class Spec:
    """How parameters are allocated: their type, their place, and which rank's share of the cut ones."""

    dtype: torch.dtype
    device: torch.device
    tp: DistributedInfo

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised parameter."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def on(self, device: torch.device) -> Spec:
        return replace(self, device=device)


class BaseOP(ABC):
    """A layer. Public tensor fields are parameters, public BaseOP fields extend the prefix; a leading underscore means "not a weight"."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""

    def state_dict(self, *, prefix: str = "", result: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Parameters by checkpoint name, added to `result` if given. The tensors are the layer's own: writing to them loads it."""
        result = {} if result is None else result
        for name, value in vars(self).items():
            if name.startswith("_"):
                continue
            if isinstance(value, torch.Tensor):
                result[prefix + name] = value
            elif isinstance(value, BaseOP):
                value.state_dict(prefix=f"{prefix}{name}.", result=result)
        return result

    def pack(self) -> None:
        """Bring the loaded matrices into the layout that computes fastest here. They are parameters no longer: nothing can be loaded."""
        for value in vars(self).values():
            if isinstance(value, BaseOP):
                value.pack()

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], *, prefix: str = "") -> None:
        """Copy `state_dict` into the parameters, converting type and device.

        Raises ModelFormatError, before anything is copied, with the names that are missing or unexpected, or with the name and both
        shapes of a tensor that does not fit.
        """
        own = self.state_dict(prefix=prefix)
        check_names(set(own), set(state_dict))
        for name, target in own.items():
            check_shape(name, state_dict[name], target)
        for name, target in own.items():
            target.copy_(state_dict[name])


class OPList(BaseOP):
    """Layers numbered from 0; the number is part of the name."""

    def __init__(self, layers: list[BaseOP]) -> None:
        self._layers = layers

    def __iter__(self) -> Any:
        return iter(self._layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a list of layers is iterated, not called")

    def pack(self) -> None:
        for layer in self._layers:
            layer.pack()

    def state_dict(self, *, prefix: str = "", result: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        result = {} if result is None else result
        for number, layer in enumerate(self._layers):
            layer.state_dict(prefix=f"{prefix}{number}.", result=result)
        return result


def check_names(wanted: set[str], found: set[str]) -> None:
    """Raise ModelFormatError naming up to ten missing and ten unexpected tensors."""
    problems = []
    for title, names in (("missing", wanted - found), ("unexpected", found - wanted)):
        if names:
            shown = ", ".join(sorted(names)[:10])
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            problems.append(f"{len(names)} {title}: {shown}{more}")
    if problems:
        raise ModelFormatError(f"the weights do not fit the model; {'; '.join(problems)}")


def check_shape(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise ModelFormatError with both shapes unless they are equal."""
    if found.shape != wanted.shape:
        raise ModelFormatError(f"{name}: shape {list(found.shape)} found, the model's config asks for {list(wanted.shape)}")
