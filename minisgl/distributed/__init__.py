"""Ranks: who one is (`DistributedInfo`), and how tensors travel between them (`Communicator`, loaded with torch on first use)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl.distributed.info import DistributedInfo

if TYPE_CHECKING:
    from minisgl.distributed.communicator import Communicator, make_communicator

__all__ = ["Communicator", "DistributedInfo", "make_communicator"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from minisgl.distributed import communicator

    return getattr(communicator, name)
