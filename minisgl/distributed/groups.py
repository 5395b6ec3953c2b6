"""Brings the ranks of one machine together: a gloo group for control data, a second group for tensors.

The rendezvous is a file in the private run directory: a TCP store would listen on all interfaces. Knows no model and no scheduler.
Called by the engine, once per process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from minisgl.distributed.info import DistributedInfo
from minisgl.errors import WorkerError

__all__ = ["Groups", "join_groups"]

JOIN_TIMEOUT_S = 60.0
"""Seconds that a rank waits for the others to start."""
COLLECTIVE_TIMEOUT_S = 600.0
"""Seconds that a rank waits for the others within a step; an idle server is in no collective."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of a rank; None where there is one rank only."""

    cpu: dist.ProcessGroup | None
    """gloo, for counts, digests and barriers: it never queues behind tensors"""
    device: dist.ProcessGroup | None
    """NCCL on GPUs, gloo on CPUs"""


def join_groups(tp_info: DistributedInfo, rendezvous: Path, device: torch.device, timeout_s: float = JOIN_TIMEOUT_S) -> Groups:
    """Wait for all ranks and form the groups. Raises WorkerError, with the cause, if they do not come together in time.

    `rendezvous` is a file that all ranks name and that no earlier server left; rank 0's caller removes it at the end.
    """
    if tp_info.size == 1:
        return Groups(None, None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    try:
        store = dist.FileStore(str(rendezvous), tp_info.size)  # type: ignore[attr-defined]  # public, but torch does not list it
        store.set_timeout(timedelta(seconds=timeout_s))
        dist.init_process_group("gloo", store=store, rank=tp_info.rank, world_size=tp_info.size, timeout=timeout)
        cpu = dist.group.WORLD
        kind = "nccl" if device.type == "cuda" else "gloo"
        return Groups(cpu, dist.new_group(backend=kind, timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"rank {tp_info.rank} of {tp_info.size} could not form a group with the others within {timeout_s:g} s: {error}"
        ) from error
