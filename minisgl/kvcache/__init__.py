"""KV pages: which are free, which hold a reusable prefix.

The bookkeeping here is host code and imports no torch; the device tensors are in `kvcache/pool.py`. The scheduler calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from minisgl.errors import ConfigError
from minisgl.kvcache.base import BasePrefixCache, InsertResult, PrefixHandle
from minisgl.kvcache.naive import NaivePrefixCache
from minisgl.kvcache.page_allocator import PageAllocator
from minisgl.kvcache.radix import RadixPrefixCache

__all__ = ["PREFIX_CACHES", "BasePrefixCache", "InsertResult", "PageAllocator", "PrefixHandle", "make_prefix_cache"]

PREFIX_CACHES: Mapping[str, type[BasePrefixCache]] = MappingProxyType({"radix": RadixPrefixCache, "naive": NaivePrefixCache})


def make_prefix_cache(cache_type: str, page_size: int) -> BasePrefixCache:
    """An empty prefix cache for pages of `page_size` tokens. Raises ConfigError for an unknown type or a page size below 1."""
    if cache_type not in PREFIX_CACHES:
        raise ConfigError(f"prefix cache {cache_type!r} found; allowed: {', '.join(PREFIX_CACHES)} (--cache-type)")
    return PREFIX_CACHES[cache_type](page_size)
