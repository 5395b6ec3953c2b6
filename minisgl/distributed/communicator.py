"""What ranks exchange as tensors: one interface, and the call site cannot tell which implementation serves it.

Knows no model and no scheduler. Made once by the engine and passed to every forward in the Context.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from minisgl.distributed.groups import Groups
from minisgl.distributed.info import DistributedInfo
from minisgl.env import is_symmetric_memory_disabled
from minisgl.errors import ConfigError

__all__ = ["Communicator", "SingleRank", "SymmetricMemory", "TorchDistributed", "make_communicator"]

logger = logging.getLogger(__name__)

SYMMETRIC_BYTES = {2: 4 * 2**20, 4: 2**20, 8: 2**19}
"""Largest sum, by number of ranks, for which each GPU reads what all others have: beyond, NCCL moves less."""
ALIGNED = 16
"""Bytes of which such a sum must be a multiple."""
SUMMED = (torch.bfloat16, torch.float32)
"""Types that the kernel adds."""


class Communicator(ABC):
    """Reduces partial sums and gathers blocks over the ranks; the same bits on every rank."""

    description: str
    """what does the sums"""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, same shape; may work in place."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Blocks of all ranks in rank order along a new first dimension: [...] -> [size, ...]."""


class SingleRank(Communicator):
    """One rank: nothing to exchange."""

    description = "none"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)


class TorchDistributed(Communicator):
    """torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.description = dist.get_backend(group)
        self._group = group
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        blocks = tensor.new_empty((self._size, *tensor.shape))
        dist.all_gather(list(blocks.unbind(0)), tensor.contiguous(), group=self._group)
        return blocks


class SymmetricMemory(TorchDistributed):
    """GPUs of one machine that read each other's memory: small sums are one kernel, in the order of the ranks; the rest is NCCL's.

    Every call goes through one buffer: the kernel ends only when all ranks have read it.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, buffer: torch.Tensor) -> None:
        """`buffer`: uint8, the same size on all ranks, from `share_buffer`."""
        super().__init__(group, size)
        self.description = f"symmetric memory up to {len(buffer) / 2**20:g} MiB, {self.description} beyond"
        self._buffer = buffer
        self._name = group.group_name

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > len(self._buffer) or num_bytes % ALIGNED or not num_bytes or tensor.dtype not in SUMMED:
            return super().all_reduce(tensor)
        shared = self._buffer[:num_bytes].view(tensor.dtype)
        shared.view(tensor.shape).copy_(tensor)  # a kernel of its own: torch's that copies as well may signal before it has stored all
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name)
        return total.view(tensor.shape)


def share_buffer(group: dist.ProcessGroup, cpu_group: dist.ProcessGroup, size: int, device: torch.device) -> torch.Tensor | None:
    """Memory of this GPU that all ranks of the group can read, uint8; None if any of them cannot, or for another number of ranks.

    All ranks call it together, and get a buffer all or none; they vote in `cpu_group`, for NCCL takes its memory at its first call.
    """
    buffer = None
    if device.type != "cuda" or size not in SYMMETRIC_BYTES:
        return None
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # never used here, and it binds resources of the switch
    can_share = not is_symmetric_memory_disabled() and all(
        torch.cuda.can_device_access_peer(device, other) for other in range(size) if other != device.index
    )
    if not _all_agree(can_share, cpu_group):
        return None
    try:
        from torch.distributed import _symmetric_memory as symmetric

        torch.ops.symm_mem.one_shot_all_reduce  # noqa: B018 - AttributeError where torch lacks it
        buffer = symmetric.empty(SYMMETRIC_BYTES[size], dtype=torch.uint8, device=device)
        symmetric.rendezvous(buffer, group)
    except (ImportError, RuntimeError, AttributeError) as error:
        logger.warning("sums over the ranks are left to NCCL: the GPUs' memory cannot be shared: %s", error)
        buffer = None
    return buffer if _all_agree(buffer is not None, cpu_group) else None


def _all_agree(answer: bool, cpu_group: dist.ProcessGroup) -> bool:
    votes = torch.tensor([int(answer)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=cpu_group)
    return bool(votes.item())


def make_communicator(tp_info: DistributedInfo, groups: Groups, device: torch.device) -> Communicator:
    """The communicator for `tp_info` on `device`; two ranks or more need both groups."""
    if tp_info.size == 1:
        return SingleRank()
    if groups.device is None or groups.cpu is None:
        raise ConfigError(f"{tp_info.size} ranks need a process group for their tensors, none was given")
    buffer = share_buffer(groups.device, groups.cpu, tp_info.size, device)
    ranks = TorchDistributed(groups.device, tp_info.size)
    return ranks if buffer is None else SymmetricMemory(groups.device, tp_info.size, buffer)
