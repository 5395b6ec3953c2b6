"""The least that a scheduler does with a prefix cache and a page allocator: the way of a request as `kvcache/base.py` describes it.

Pages have no contents here, so `Ledger` writes down which tokens each page was computed for; a table that names a page of other
contents is what would be wrong text in a real server.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.kvcache import PageAllocator, PrefixHandle, make_prefix_cache


@dataclass(eq=False)
class Request:
    tokens: np.ndarray
    salt: str | None
    row: np.ndarray
    """Its pages, in the order of its tokens."""
    handle: PrefixHandle
    num_cached_tokens: int
    """Prompt tokens that it need not compute."""


class Ledger:
    def __init__(self, cache_type: str, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.cache = make_prefix_cache(cache_type, page_size)
        self.allocator = PageAllocator(num_pages)
        self.running: list[Request] = []
        self.contents: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def admit(self, tokens: np.ndarray, salt: str | None = None, num_output_tokens: int = 1) -> Request | None:
        """Pages for the prompt and its output, or None if there are not enough and the request has to wait."""
        handle = self.cache.match(tokens[:-1], salt)
        self.cache.lock(handle)
        num_pages = -(-(len(tokens) + num_output_tokens) // self.page_size) - handle.num_pages
        if num_pages > self.allocator.num_free + self.cache.num_evictable_pages:
            self.cache.unlock(handle)
            return None
        self.allocator.free(self.cache.evict(max(0, num_pages - self.allocator.num_free)))
        own = self.allocator.alloc(num_pages)
        request = Request(tokens, salt, np.concatenate([handle.pages, own]), handle, handle.num_tokens)
        for index in range(handle.num_pages, len(tokens) // self.page_size):
            self.contents[int(request.row[index])] = (salt, tuple(tokens[: (index + 1) * self.page_size].tolist()))
        self.running.append(request)
        self.check_table(request)
        return request

    def share(self, request: Request, num_tokens: int) -> None:
        """Offer the whole pages of the first `num_tokens` tokens to others; the request goes on with the canonical pages."""
        num_pages = num_tokens // self.page_size
        result = self.cache.insert(request.tokens[: num_pages * self.page_size], request.row[:num_pages], request.salt)
        self.cache.lock(result.handle)
        self.cache.unlock(request.handle)
        request.handle = result.handle
        request.row[: result.handle.num_pages] = result.handle.pages
        self.allocator.free(result.duplicate_pages)
        self.check_table(request)

    def finish(self, request: Request) -> None:
        self.share(request, len(request.tokens))
        self.abort(request)

    def abort(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.unlock(request.handle)
        self.allocator.free(request.row[request.handle.num_pages :])

    def check_table(self, request: Request) -> None:
        for index in range(len(request.tokens) // self.page_size):
            wanted = (request.salt, tuple(request.tokens[: (index + 1) * self.page_size].tolist()))
            assert self.contents[int(request.row[index])] == wanted

    def check(self) -> None:
        """free + cached + held == total, no page twice, and every running request's table names pages of its own tokens."""
        cached = self.cache.check_integrity().tolist()
        self.allocator.check_integrity()
        held = [page for request in self.running for page in request.row[request.handle.num_pages :].tolist()]
        assert sorted(self.allocator.free_pages().tolist() + cached + held) == list(range(self.allocator.num_pages))
        assert self.cache.num_evictable_pages + self.cache.num_locked_pages == len(cached)
        assert self.cache.num_evictable_pages >= 0
        assert self.cache.num_locked_pages >= 0
        for request in self.running:
            assert set(request.handle.pages.tolist()) <= set(cached)
            self.check_table(request)

    def drain(self) -> None:
        """Abort what runs, empty the cache: all pages are free again."""
        for request in list(self.running):
            self.abort(request)
        self.allocator.free(self.cache.reset())
        self.check()
        assert self.allocator.num_free == self.allocator.num_pages
