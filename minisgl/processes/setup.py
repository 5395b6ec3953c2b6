"""What a child process is told by whoever starts it, as JSON on the way. Frozen values.

Knows no program's own settings: they travel in `ChildSetup.own`. Made by `children`, read by `child`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgspec

from minisgl.distributed.info import DistributedInfo
from minisgl.scheduler.config import SchedulerConfig

__all__ = ["STEP_TIMEOUT_S", "ChildSetup", "settings_of"]

STEP_TIMEOUT_S = {"cpu": 60.0, "cuda": 10.0}
"""Where `step_timeout` is 0."""


class ChildSetup(msgspec.Struct, frozen=True):
    """The first line that a child reads from its standard input."""

    settings: dict[str, Any]
    """the fields of SchedulerConfig; `model_path` is a directory"""
    step_timeout: float = 0.0
    """seconds after which a step counts as stuck; 0 is STEP_TIMEOUT_S of the device"""
    heartbeat_fd: int = -1
    """file descriptor of the memory for signs of life"""
    workers: list[str] = []
    """names of all children, in the order of their places in that memory"""
    place: int = 0
    """this child's place among them"""
    report_fd: int = -1
    """file descriptor on which it reports"""
    listen_fd: int = -1
    """file descriptor of the listening TCP socket; only of a program that listens"""
    own: dict[str, Any] = {}
    """what this child's program wants to know beside all that, as plain JSON values"""

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(**{**self.settings, "tp_info": DistributedInfo(**self.settings["tp_info"])})


def settings_of(config: SchedulerConfig, rank: int = 0) -> dict[str, Any]:
    """The fields of `config` for one rank as plain JSON values; the inverse of `ChildSetup.config`."""
    return asdict(replace(config, tp_info=DistributedInfo(rank, config.tp_info.size)))
