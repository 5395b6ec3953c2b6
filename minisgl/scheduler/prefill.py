"""Prompts: which waiting requests are admitted, and how many tokens of which prompt the next prefill step computes.

Waiting requests keep the order of their messages (retracted ones go to the head); nobody overtakes a request that does not fit yet.
Knows the table and the page ledger, no device and no messages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np

from minisgl.core import Int32Array, Req
from minisgl.scheduler import states
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.table import IntArray, RequestTable

__all__ = ["PrefillManager"]


class PrefillManager:
    """Requests whose next token cannot be sampled yet."""

    def __init__(
        self, table: RequestTable, cache: CacheManager, reserve_tokens: int, on_admission: Callable[[Req], None] = lambda _: None
    ) -> None:
        """`on_admission` is called when a request leaves the queue for the first time."""
        self._table = table
        self._cache = cache
        self._reserve_tokens = reserve_tokens
        self._on_admission = on_admission
        self.waiting: OrderedDict[Req, None] = OrderedDict()
        """in the order in which they are admitted; an aborted one leaves in O(1)"""
        self.prefilling: list[Req] = []
        """in the order of their admission"""
        self._refused: tuple[Req, int, int] | None = None
        """(request, cache generation, free slots) of the head that did not fit, so that it is not tried again in vain"""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling)

    def add(self, req: Req) -> None:
        """A new request, to the end of the queue."""
        self.waiting[req] = None

    def put_back(self, req: Req) -> None:
        """A retracted request, to the head of the queue."""
        self.waiting[req] = None
        self.waiting.move_to_end(req, last=False)

    def remove(self, req: Req) -> None:
        """Forget a request, wherever it stands here."""
        self.waiting.pop(req, None)
        if req in self.prefilling:
            self.prefilling.remove(req)

    def schedule(self, budget: int) -> list[tuple[Req, int]]:
        """(request, new tokens) of the next prefill step, at most `budget` tokens together, pages allocated; empty if nothing fits."""
        chunks: list[tuple[Req, int]] = []
        for req in self._candidates():
            if budget == 0:
                break
            num_tokens = self._allocate(req, min(budget, req.extend_len))
            if num_tokens == 0:
                break
            chunks.append((req, num_tokens))
            budget -= num_tokens
        return chunks

    def _candidates(self) -> Iterator[Req]:
        """Requests in prefill, then newly admitted ones; lazily, since admission depends on what the earlier ones took."""
        yield from tuple(self.prefilling)
        while (req := self._admit_next()) is not None:
            yield req

    def _allocate(self, req: Req, num_tokens: int) -> int:
        """Give the row pages for its next tokens; how many tokens have a page, `num_tokens` at most."""
        page_size = self._table.page_size
        room = (int(self._table.num_pages[req.slot]) + self._cache.num_available) * page_size - req.cached_len
        num_tokens = min(num_tokens, room)
        if num_tokens > 0:
            slots = np.array([req.slot])
            self._cache.allocate(slots, self._table.num_pages_needed(slots, np.array([req.cached_len + num_tokens])))
        return max(num_tokens, 0)

    def _admit_next(self) -> Req | None:
        """Admit the head of the queue if it fits now: a slot, its prompt's pages and the next reserve, beside everyone else's."""
        table, cache = self._table, self._cache
        if not self.waiting or not table.num_free_slots:
            return None
        req = next(iter(self.waiting))
        attempt = (req, cache.generation, table.num_free_slots)
        if self._refused == attempt:
            return None
        promised = self._promised_pages()
        is_alone = table.num_free_slots == table.num_slots
        table.take_slot(req)
        cache.attach_prefix(req)
        slots = np.array([req.slot])
        needed = int(table.num_pages_needed(slots, self._reserved_lengths(slots))[0])
        if not is_alone and needed + promised > cache.num_available:
            cache.detach_prefix(req)
            table.return_slot(req)
            self._refused = attempt
            return None
        del self.waiting[req]
        states.admit(req)
        self.prefilling.append(req)
        if req.num_retractions == 0:
            req.num_cached_tokens = req.cached_len
            self._on_admission(req)
        return req

    def _reserved_lengths(self, slots: IntArray) -> Int32Array:
        """Tokens that each row may reach on its reserve."""
        table = self._table
        reserved: Int32Array = np.minimum(table.device[slots] + self._reserve_tokens, table.most[slots])
        return reserved

    def _promised_pages(self) -> int:
        """Pages that live requests do not hold yet but may take on their reserve."""
        slots = np.flatnonzero(self._table.is_live)
        return int(self._table.num_pages_needed(slots, self._reserved_lengths(slots)).sum())
