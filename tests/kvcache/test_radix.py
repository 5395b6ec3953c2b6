"""What only the radix tree does: sharing, remapping, order of eviction; and the failures of other servers as tests."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from minisgl.errors import IntegrityError
from minisgl.kvcache import make_prefix_cache
from tests.kvcache.ledger import Ledger


def tokens(num_tokens: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


# Order of eviction


def test_the_least_recently_matched_prefix_goes_first() -> None:
    cache = make_prefix_cache("radix", 2)
    for index in range(3):
        cache.insert(tokens(2, first=10 * index), pages(index))
    cache.match(tokens(2, first=0))
    assert [cache.evict(1).tolist() for _ in range(4)] == [[1], [2], [0], []]


def test_the_last_unlock_counts_as_a_use() -> None:
    cache = make_prefix_cache("radix", 2)
    handle = cache.insert(tokens(2), pages(0)).handle
    cache.lock(handle)
    cache.insert(tokens(2, first=10), pages(1))
    cache.unlock(handle)
    assert [cache.evict(1).tolist() for _ in range(2)] == [[1], [0]]


def test_a_prefix_outlives_everything_that_extends_it() -> None:
    cache = make_prefix_cache("radix", 1)
    cache.insert(pages(1, 2, 3), pages(10, 11, 12))
    cache.insert(pages(1, 2, 4), pages(10, 11, 13))
    cache.match(pages(1, 2, 3))
    assert [cache.evict(1).tolist() for _ in range(4)] == [[13], [12], [11], [10]]


def test_eviction_takes_no_more_than_asked_and_from_the_end() -> None:
    cache = make_prefix_cache("radix", 16)
    handle = cache.insert(tokens(64), pages(3, 1, 2, 0)).handle
    assert cache.evict(1).tolist() == [0]
    assert cache.match(tokens(64)).pages.tolist() == [3, 1, 2]
    with pytest.raises(IntegrityError, match="64 tokens is no longer in this cache"):
        cache.lock(handle)


def test_a_shortened_prefix_gives_its_memory_back() -> None:
    cache = make_prefix_cache("radix", 1)
    num_tokens = 1_000_000
    tracemalloc.start()
    cache.insert(tokens(num_tokens), tokens(num_tokens))
    full, _ = tracemalloc.get_traced_memory()
    cache.evict(num_tokens - 1)
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < full / 100
    assert cache.check_integrity().tolist() == [0]


# The walk


def test_a_page_that_two_prefixes_name_is_found_by_the_walk() -> None:
    cache = make_prefix_cache("radix", 2)
    cache.insert(tokens(2), pages(5))
    cache.insert(tokens(2, first=10), pages(5))
    with pytest.raises(IntegrityError, match=r"twice: \[5\]"):
        cache.check_integrity()


def test_a_negative_page_is_found_by_the_walk() -> None:
    cache = make_prefix_cache("radix", 2)
    cache.insert(tokens(2), pages(-1))
    with pytest.raises(IntegrityError, match=r"below 0: \[-1\]"):
        cache.check_integrity()


# Failures seen in other servers


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_case_61_two_requests_that_compute_one_prefix_end_up_on_its_canonical_pages(page_size: int) -> None:
    ledger = Ledger("radix", page_size, num_pages=1200 // page_size)
    first, second = ledger.admit(tokens(20), num_output_tokens=400), ledger.admit(tokens(20), num_output_tokens=400)
    assert first is not None
    assert second is not None
    num_shared = 20 // page_size
    duplicates = second.row[:num_shared].tolist()
    ledger.share(first, 20)
    ledger.share(second, 20)
    assert second.row[:num_shared].tolist() == first.row[:num_shared].tolist()
    assert set(duplicates) <= set(ledger.allocator.free_pages().tolist())
    for index in range(50):  # others take the freed pages
        other = ledger.admit(tokens(40, first=1000 * (index + 1)))
        assert other is not None
        ledger.finish(other)
        ledger.check()
    ledger.finish(first)
    ledger.finish(second)
    ledger.drain()


@pytest.mark.parametrize("page_size", [1, 16])
def test_case_63_the_matched_node_itself_is_locked_not_only_its_parents(page_size: int) -> None:
    ledger = Ledger("radix", page_size, num_pages=64)
    prefix = tokens(2 * page_size)
    warm = ledger.admit(prefix)
    assert warm is not None
    ledger.finish(warm)
    running = ledger.admit(np.concatenate([prefix, tokens(1, first=9000)]))
    assert running is not None
    assert running.num_cached_tokens == 2 * page_size
    assert ledger.cache.evict(1000).tolist() == []
    assert ledger.cache.match(prefix).num_tokens == 2 * page_size
    ledger.abort(running)
    evicted = ledger.cache.evict(1000)
    assert len(evicted) == 2
    ledger.allocator.free(evicted)
    ledger.drain()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_tokens", [31, 32, 33])
def test_case_65_a_full_hit_leaves_a_token_to_compute(page_size: int, num_tokens: int) -> None:
    ledger = Ledger("radix", page_size, num_pages=200)
    for is_warm in (False, True, True):
        request = ledger.admit(tokens(num_tokens))
        assert request is not None
        assert request.num_cached_tokens == (is_warm * (num_tokens - 1) // page_size) * page_size
        ledger.finish(request)
        ledger.check()
    ledger.drain()


def test_case_67_prompts_around_one_page_leave_no_empty_node_and_evict_clean() -> None:
    ledger = Ledger("radix", 16, num_pages=32)
    for num_tokens in (1, 15, 16, 17, 17, 16, 15, 1):
        request = ledger.admit(tokens(num_tokens))
        assert request is not None
        ledger.finish(request)
        ledger.check()
    assert ledger.cache.num_evictable_pages == 1
    evicted = ledger.cache.evict(16)
    assert len(evicted) == 1
    ledger.allocator.free(evicted)
    ledger.check()
    assert ledger.allocator.num_free == 32


def test_case_86_room_is_counted_in_pages_so_the_second_prompt_waits() -> None:
    ledger = Ledger("radix", 16, num_pages=4)
    first = ledger.admit(tokens(17))
    assert first is not None
    assert ledger.admit(tokens(33, first=1000)) is None  # 64 - 18 = 46 tokens are free, but only 2 pages, and it needs 3
    ledger.check()
    ledger.finish(first)
    second = ledger.admit(tokens(33, first=1000))
    assert second is not None
    ledger.check()
    ledger.finish(second)
    ledger.drain()
