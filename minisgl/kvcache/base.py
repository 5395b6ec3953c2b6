"""What a prefix cache is: token prefixes, page-aligned, with the KV pages that hold their keys and values.

A prefix cache is bookkeeping only. It must not know a device, a model, a request, a clock or a random number: every rank runs the
same calls and must get the same page ids. The scheduler's cache part calls it.

Who owns a page: the allocator's free list, a request, or the prefix cache, and always exactly one of them. `insert` moves pages from
the request to the cache, `evict` and `reset` hand them back to the caller, who frees them.

How a request uses it:
 1. `handle = match(tokens[: n - 1])` (one token is left to compute), `lock(handle)`; `handle.pages` open its page table row.
 2. When a chunk, or the request, is done: `result = insert(tokens[:m], pages[: m // page_size])`, m a multiple of the page size and
    at least `handle.num_tokens` (with less, pages of the old handle would seem to be the request's).
 3. `lock(result.handle)`, `unlock(handle)`, write `result.handle.pages` over the start of the row, then free `result.duplicate_pages`.
 4. Pages beyond `result.handle.num_pages` still belong to the request. (`naive` never takes any: its handles have no tokens.)
 5. At the end: `unlock` the handle it holds, free the pages of point 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl.core import Int32Array
from minisgl.errors import ConfigError, IntegrityError

__all__ = ["BasePrefixCache", "InsertResult", "PrefixHandle"]


@dataclass(slots=True, eq=False)
class PrefixHandle:
    """A cached prefix as its cache returned it. Opaque but for its length and its pages; only the cache that made it changes it.

    Until it is locked the prefix may be evicted; `lock` then raises. While it is locked `pages` stay where they are.
    """

    num_tokens: int
    """Length of the prefix in tokens, a multiple of the page size."""
    pages: Int32Array
    """[num_tokens / page_size] canonical pages, in the order of the tokens"""
    node: Any = None
    """The cache's own."""
    num_locks: int = 0
    """How often it is locked now."""

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    def count_unlock(self) -> None:
        """Take one lock off the count. Raises IntegrityError if there is none: a request released its prefix twice."""
        if self.num_locks < 1:
            raise IntegrityError(f"a prefix of {self.num_tokens} tokens is unlocked more often than it was locked")
        self.num_locks -= 1


@dataclass(frozen=True, slots=True, eq=False)
class InsertResult:
    """What became of inserted pages."""

    handle: PrefixHandle
    """The inserted prefix with its canonical pages, not locked. `handle.num_tokens` tokens are the cache's; the rest stay the caller's."""
    num_existing_tokens: int
    """Tokens that were in the cache before."""
    duplicate_pages: Int32Array
    """The caller's pages that hold what canonical pages hold too. The caller frees them once its table no longer names them."""


class BasePrefixCache(ABC):
    """One interface for all prefix caches. `page_size` is in tokens; raises ConfigError if it is below 1.

    `salt` keeps tenants apart: prefixes with different salts never meet, and None is a salt of its own.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page size {page_size} found; at least 1 token is allowed")
        self.page_size = page_size

    @property
    @abstractmethod
    def num_evictable_pages(self) -> int:
        """Pages in the cache that `evict` could free now. O(1)."""

    @property
    @abstractmethod
    def num_locked_pages(self) -> int:
        """Pages in the cache that a lock protects. O(1)."""

    @abstractmethod
    def match(self, tokens: Int32Array, salt: str | None = None) -> PrefixHandle:
        """The longest cached prefix of `tokens` (int32 [n], any n >= 0), in whole pages. Counts as a use; does not lock."""

    @abstractmethod
    def lock(self, handle: PrefixHandle) -> None:
        """Protect the handle's whole prefix from eviction, once more. Raises IntegrityError if it was evicted since it was made."""

    @abstractmethod
    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`; counts as a use. Raises IntegrityError if the handle is not locked."""

    @abstractmethod
    def insert(self, tokens: Int32Array, pages: Int32Array, salt: str | None = None) -> InsertResult:
        """Offer the pages that hold `tokens`; both are copied. Counts as a use; does not lock.

        `tokens` is int32 [n], n a multiple of the page size; `pages` is int32 [n / page_size]; anything else raises IntegrityError.
        Where the cache has the tokens already its own pages stay canonical, and those of the caller's that differ come back as
        duplicates.
        """

    @abstractmethod
    def evict(self, num_pages: int) -> Int32Array:
        """Take exactly `num_pages` unlocked pages out, fewer if there are not as many; int32, the caller frees them.

        The least recently used prefix loses its last page first. Uses are `match`, `insert`, and the `unlock` that ends a
        protection.
        """

    @abstractmethod
    def check_integrity(self) -> Int32Array:
        """Walk all there is, recompute every counter, and return all pages in the cache. Raises IntegrityError with what was found."""

    def reset(self) -> Int32Array:
        """Take everything out and return its pages; the caller frees them. Raises IntegrityError while anything is locked."""
        if self.num_locked_pages:
            raise IntegrityError(f"reset of a prefix cache with {self.num_locked_pages} locked pages; unlock them first")
        return self.evict(self.num_evictable_pages)

    def check_shapes(self, tokens: Int32Array, pages: Int32Array) -> None:
        """Raise IntegrityError unless there is one page for every `page_size` tokens and no token left over."""
        if len(tokens) != len(pages) * self.page_size:
            raise IntegrityError(f"{len(tokens)} tokens inserted with {len(pages)} pages of {self.page_size} tokens")


def no_pages() -> Int32Array:
    """An empty array of page ids."""
    return np.empty(0, dtype=np.int32)
