"""What ranks exchange as tensors: one interface, and the call site cannot tell which implementation serves it.

Knows no model and no scheduler. Made once by the engine and passed to every forward in the Context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from minisgl.distributed.info import DistributedInfo
from minisgl.errors import ConfigError

__all__ = ["Communicator", "SingleRank", "TorchDistributed", "make_communicator"]


class Communicator(ABC):
    """Reduces partial sums and gathers blocks over the ranks; the same bits on every rank."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, same shape; may work in place."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Blocks of all ranks in rank order along a new first dimension: [...] -> [size, ...]."""


class SingleRank(Communicator):
    """One rank: nothing to exchange."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)


class TorchDistributed(Communicator):
    """torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        blocks = tensor.new_empty((self._size, *tensor.shape))
        dist.all_gather(list(blocks.unbind(0)), tensor.contiguous(), group=self._group)
        return blocks


def make_communicator(tp_info: DistributedInfo, group: dist.ProcessGroup | None) -> Communicator:
    """The communicator for `tp_info`; `group` carries the tensors and is needed for two ranks or more."""
    if tp_info.size == 1:
        return SingleRank()
    if group is None:
        raise ConfigError(f"{tp_info.size} ranks need a process group for their tensors, none was given")
    return TorchDistributed(group, tp_info.size)
