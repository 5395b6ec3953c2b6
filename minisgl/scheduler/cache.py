"""Who owns which page: free, in the prefix cache, or held by a request's row. Takes and gives pages for the scheduler.

`free + cached + held == total` after every call. Pages that a launched step may still read or write are not reused before that step
has been read. Knows no device and no messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.core import CACHED, Int32Array, Req
from minisgl.errors import IntegrityError
from minisgl.kvcache import BasePrefixCache, PageAllocator
from minisgl.scheduler.table import IntArray, RequestTable

__all__ = ["CacheManager", "PageCounts"]


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Where the pages of the pool are. All in pages."""

    total: int
    free: int
    evictable: int
    """in the prefix cache, used by no request"""
    locked: int
    """in the prefix cache, used by requests"""
    deferred: int
    """duplicates that become free once the step in flight has been read"""

    @property
    def held(self) -> int:
        """by one request each"""
        return self.total - self.free - self.evictable - self.locked - self.deferred


class CacheManager:
    """The page ledger of one scheduler."""

    def __init__(self, allocator: PageAllocator, prefix_cache: BasePrefixCache, table: RequestTable) -> None:
        self._allocator = allocator
        self._prefix_cache = prefix_cache
        self._table = table
        self._deferred: list[tuple[int, Int32Array]] = []
        """(step, pages): duplicates that a launched step may still use; free once the step has been read"""
        self.generation = 0
        """Counts the events after which a request that did not fit might fit."""

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones and those of unlocked prefixes."""
        return self._allocator.num_free + self._prefix_cache.num_evictable_pages

    @property
    def counts(self) -> PageCounts:
        allocator, cache = self._allocator, self._prefix_cache
        num_deferred = sum(len(pages) for _, pages in self._deferred)
        return PageCounts(allocator.num_pages, allocator.num_free, cache.num_evictable_pages, cache.num_locked_pages, num_deferred)

    def attach_prefix(self, req: Req) -> None:
        """Lock the longest cached prefix for a request that has just taken a slot; at least one token is left to compute."""
        end = req.host_len - 1
        if req.sampling_params.prompt_logprobs is not None:
            end = min(end, req.num_scored)  # what is cached is not computed, and has no logits
        handle = self._prefix_cache.match(req.tokens[:end], req.cache_salt)
        self._prefix_cache.lock(handle)
        req.cache_handle = handle
        req.lengths[CACHED] = handle.num_tokens
        self._table.write_pages(req.slot, 0, handle.pages)

    def detach_prefix(self, req: Req) -> None:
        """Undo `attach_prefix` for a request that was not admitted after all."""
        self._prefix_cache.unlock(req.cache_handle)
        req.cache_handle = None
        req.lengths[CACHED] = 0

    def allocate(self, slots: IntArray, counts: npt.NDArray[np.int64]) -> None:
        """Append `counts` pages to the rows `slots`, evicting where needed. The caller has looked at `num_available`."""
        total = int(counts.sum())
        if not total:
            return
        missing = total - self._allocator.num_free
        if missing > 0:
            self._allocator.free(self._prefix_cache.evict(missing))
        self._table.append_pages(slots, counts, self._allocator.alloc(total))

    def share_prefix(self, req: Req, num_tokens: int, last_step: int) -> None:
        """Offer the first `num_tokens` tokens, whose K/V is valid, to the prefix cache and move the row to the canonical pages.

        Duplicates become free once `last_step`, the last launched step that may use them, has been read.
        """
        table, page_size = self._table, self._table.page_size
        num_pages = num_tokens // page_size
        if num_pages <= req.cache_handle.num_pages:
            return
        pages = table.pages[req.slot, :num_pages]
        result = self._prefix_cache.insert(req.tokens[: num_pages * page_size], pages, req.cache_salt)
        self._prefix_cache.lock(result.handle)
        self._prefix_cache.unlock(req.cache_handle)
        req.cache_handle = result.handle
        if len(result.duplicate_pages):
            table.write_pages(req.slot, 0, result.handle.pages)
            self._deferred.append((last_step, result.duplicate_pages))
        self.generation += 1

    def release(self, req: Req) -> None:
        """Give back all that the request holds but its slot: full pages of valid tokens to the prefix cache, the rest to the free list."""
        self.share_prefix(req, min(req.cached_len, req.host_len), last_step=-1)
        num_shared, slot = req.cache_handle.num_pages, req.slot
        self._prefix_cache.unlock(req.cache_handle)
        req.cache_handle = None
        self._allocator.free(self._table.pages[slot, num_shared : self._table.num_pages[slot]])
        self._table.num_pages[slot] = 0
        self.collect(-1)
        self.generation += 1

    def collect(self, step: int) -> None:
        """Step `step` has been read: free the duplicates that waited for it."""
        if not self._deferred:
            return
        for _, pages in (entry for entry in self._deferred if entry[0] <= step):
            self._allocator.free(pages)
            self.generation += 1
        self._deferred = [entry for entry in self._deferred if entry[0] > step]

    def reset(self) -> None:
        """Forget all prefixes. Raises IntegrityError while a request holds one."""
        self._allocator.free(self._prefix_cache.reset())

    def check_integrity(self) -> None:
        """Walk everything and count. Raises IntegrityError with what was found."""
        self._allocator.check_integrity()
        cached = self._prefix_cache.check_integrity()
        held = [pages for _, pages in self._deferred]
        for req in self._table.live_reqs():
            if req.cache_handle is None:
                raise IntegrityError(f"request {req.uid} holds slot {req.slot} without a handle in the prefix cache")
            row = self._table.pages[req.slot, : self._table.num_pages[req.slot]]
            shared = req.cache_handle.num_pages
            if not np.array_equal(row[:shared], req.cache_handle.pages):
                raise IntegrityError(f"request {req.uid}: its row does not begin with the pages of its locked prefix")
            held.append(row[shared:])
        places = np.concatenate((self._allocator.free_pages(), cached, *held))
        times = np.bincount(places, minlength=self._allocator.num_pages)
        if len(times) != self._allocator.num_pages or (times != 1).any():
            wrong = np.flatnonzero(times != 1)[:8].tolist()
            counts = f"free {self._allocator.num_free} + cached {len(cached)} + held {sum(map(len, held))}"
            raise IntegrityError(f"{counts} of {self._allocator.num_pages} pages; in no place or in several: {wrong}")
