"""Requests that sample one token a step. Knows the table only."""

from __future__ import annotations

import numpy as np

from minisgl.core import DEVICE, MAX_DEVICE, Int32Array, Req
from minisgl.scheduler.table import RequestTable

__all__ = ["DecodeManager"]


class DecodeManager:
    """The running requests, in the order of their uids."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.running: dict[int, Req] = {}
        """by uid"""
        self._slots: Int32Array | None = None
        """slots in the order of the uids; None when it must be made anew"""

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, req: Req) -> None:
        self.running[req.uid] = req
        self._slots = None

    def remove(self, req: Req) -> None:
        if self.running.pop(req.uid, None) is not None:
            self._slots = None

    def schedule(self) -> Int32Array:
        """Slots of all that can go on, ascending by uid. Those whose last token is in flight already are left out."""
        if self._slots is None:
            self._slots = np.array([self.running[uid].slot for uid in sorted(self.running)], dtype=np.int32)
        lengths = self._table.lengths[self._slots]
        can_go_on = lengths[:, DEVICE] < lengths[:, MAX_DEVICE]
        return self._slots if can_go_on.all() else self._slots[can_go_on]
