"""The scheduler: what runs next, in which pages, and how messages come in and go out.

Exports load on first use, so that the queues, the addresses and the IO layer can be used without loading a model's code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.scheduler.config import SchedulerConfig
    from minisgl.scheduler.io import SchedulerIOMixin
    from minisgl.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerIOMixin"]

_HOMES = {"Scheduler": "scheduler", "SchedulerConfig": "config", "SchedulerIOMixin": "io"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
