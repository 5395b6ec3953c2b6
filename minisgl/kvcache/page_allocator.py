"""Which KV pages are free: a stack of page ids, the same on every rank after the same calls.

It must not know what a page holds, who holds it, or a device. The scheduler's cache part calls it. The padding request's extra page
is not among its pages.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32Array
from minisgl.errors import ConfigError, IntegrityError

__all__ = ["PageAllocator"]

HELD = -1
"""In place of a page's position in the stack: it is not free."""


class PageAllocator:
    """Pages 0..num_pages-1, all free at first and handed out in that order; afterwards what was freed last goes out first.

    All operations cost O(pages they move). Raises ConfigError for a negative `num_pages`.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ConfigError(f"{num_pages} KV pages found; at least 0 is allowed")
        self.num_pages = num_pages
        self._num_free = num_pages
        self._stack: Int32Array = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        """Free page ids; valid up to `_num_free`."""
        self._position: Int32Array = self._stack.copy()
        """Each page's index in the stack, or HELD."""

    @property
    def num_free(self) -> int:
        return self._num_free

    def alloc(self, num_pages: int) -> Int32Array:
        """Take pages; int32 [num_pages]. Raises IntegrityError if fewer are free: the caller looks at `num_free` first."""
        if not 0 <= num_pages <= self._num_free:
            raise IntegrityError(f"allocation of {num_pages} pages; 0 to {self._num_free} are free")
        start = self._num_free - num_pages
        pages: Int32Array = self._stack[start : self._num_free][::-1].copy()
        self._position[pages] = HELD
        self._num_free = start
        return pages

    def free(self, pages: Int32Array) -> None:
        """Give pages back, [n] of any n >= 0. Raises IntegrityError, and frees none, if one is free already, named twice or unknown."""
        if len(pages) == 0:
            return
        if pages.min() < 0 or pages.max() >= self.num_pages:
            raise IntegrityError(f"pages {_some(pages)} freed; 0 to {self.num_pages - 1} exist")
        if (self._position[pages] != HELD).any():
            raise IntegrityError(f"pages {_some(pages[self._position[pages] != HELD])} freed while free")
        end = self._num_free + len(pages)
        slots = np.arange(self._num_free, end, dtype=np.int32)
        self._position[pages] = slots
        named_twice = self._position[pages] != slots  # a later mention has overwritten the earlier one's position
        if named_twice.any():
            self._position[pages] = HELD
            raise IntegrityError(f"pages {_some(pages[named_twice])} freed twice in one call")
        self._stack[self._num_free : end] = pages
        self._num_free = end

    def free_pages(self) -> Int32Array:
        """The free page ids, a copy; the last one goes out next."""
        pages: Int32Array = self._stack[: self._num_free].copy()
        return pages

    def check_integrity(self) -> None:
        """Recompute all there is. Raises IntegrityError with what was found."""
        free = self.free_pages()
        num_marked = int(np.count_nonzero(self._position != HELD))
        if num_marked != self._num_free:
            raise IntegrityError(f"{num_marked} pages are marked free, {self._num_free} are counted")
        if not np.array_equal(self._position[free], np.arange(self._num_free)):
            raise IntegrityError(f"the free list names pages twice or out of place: {_some(free)}")


def _some(pages: Int32Array) -> str:
    """At most eight of the pages, for a message."""
    return f"{pages[:8].tolist()}{'...' if len(pages) > 8 else ''}"
