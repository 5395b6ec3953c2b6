"""Requests that sample one token a step. Knows the table only."""

from __future__ import annotations

import numpy as np

from minisgl.core import Req
from minisgl.scheduler.plan import Rows, decode_rows
from minisgl.scheduler.table import RequestTable

__all__ = ["DecodeManager"]


class DecodeManager:
    """The running requests, in the order of their uids."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.running: dict[int, Req] = {}
        """by uid"""
        self._rows: Rows | None = None
        """all of them; None when it must be made anew"""

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, req: Req) -> None:
        self.running[req.uid] = req
        self._rows = None

    def remove(self, req: Req) -> None:
        if self.running.pop(req.uid, None) is not None:
            self._rows = None

    def schedule(self) -> Rows | None:
        """All that can go on, ascending by uid; None if there is nobody. Those whose last token is in flight already are left out."""
        if not self.running:
            return None
        table = self._table
        if self._rows is None:
            self._rows = decode_rows(table, np.array([self.running[uid].slot for uid in sorted(self.running)], dtype=np.int32))
        slots = self._rows.slots
        can_go_on = table.device[slots] < table.most[slots]
        if can_go_on.all():
            return self._rows
        return decode_rows(table, slots[can_go_on]) if can_go_on.any() else None
