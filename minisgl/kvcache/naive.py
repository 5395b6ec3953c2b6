"""The prefix cache that caches nothing: every request keeps its own pages and computes its whole prompt.

It is the same interface as the radix tree's, so the scheduler does not know the difference. `make_prefix_cache("naive", ...)` makes it.
"""

from __future__ import annotations

from minisgl.core import Int32Array
from minisgl.errors import IntegrityError
from minisgl.kvcache.base import BasePrefixCache, InsertResult, PrefixHandle, no_pages

__all__ = ["NaivePrefixCache"]


class NaivePrefixCache(BasePrefixCache):
    """Matches nothing and takes no page: all handles are empty."""

    @property
    def num_evictable_pages(self) -> int:
        return 0

    @property
    def num_locked_pages(self) -> int:
        return 0

    # Whatever the tokens are, nothing is cached.
    def match(self, tokens: Int32Array, salt: str | None = None) -> PrefixHandle:  # noqa: ARG002
        return PrefixHandle(0, no_pages(), node=self)

    def lock(self, handle: PrefixHandle) -> None:
        self._check_owner(handle)
        handle.num_locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        self._check_owner(handle)
        handle.count_unlock()

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: str | None = None) -> InsertResult:
        self.check_shapes(tokens, pages)
        return InsertResult(self.match(tokens, salt), 0, no_pages())

    def evict(self, num_pages: int) -> Int32Array:
        if num_pages < 0:
            raise IntegrityError(f"eviction of {num_pages} pages; at least 0 is allowed")
        return no_pages()

    def check_integrity(self) -> Int32Array:
        return no_pages()

    def _check_owner(self, handle: PrefixHandle) -> None:
        if handle.node is not self:
            raise IntegrityError("the handle was made by another prefix cache")
