"""What every prefix cache promises, over all registered types and several page sizes."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from minisgl.errors import ConfigError, IntegrityError
from minisgl.kvcache import PREFIX_CACHES, BasePrefixCache, make_prefix_cache
from tests.kvcache.ledger import Ledger

PAGE_SIZES = [1, 2, 16, 64]


@pytest.fixture(params=PREFIX_CACHES)
def cache_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=PAGE_SIZES)
def page_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def cache(cache_type: str, page_size: int) -> BasePrefixCache:
    return make_prefix_cache(cache_type, page_size)


def tokens(num_tokens: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_a_new_cache_is_empty(cache: BasePrefixCache) -> None:
    assert cache.num_evictable_pages == cache.num_locked_pages == 0
    assert cache.match(tokens(200)).num_tokens == 0
    for array in (cache.match(tokens(200)).pages, cache.evict(5), cache.reset(), cache.check_integrity()):
        assert array.dtype == np.int32
        assert array.shape == (0,)


def test_a_match_is_whole_pages_and_never_longer_than_the_prompt(cache: BasePrefixCache, page_size: int) -> None:
    num_taken = cache.insert(tokens(4 * page_size), pages(7, 3, 5, 1)).handle.num_pages
    for num_tokens in range(5 * page_size):
        handle = cache.match(tokens(num_tokens))
        assert handle.num_tokens == min(num_tokens // page_size, num_taken) * page_size
        assert handle.pages.tolist() == [7, 3, 5, 1][: handle.num_pages]
    cache.check_integrity()


def test_insert_takes_all_pages_or_none(cache: BasePrefixCache, page_size: int) -> None:
    result = cache.insert(tokens(3 * page_size), pages(2, 0, 1))
    assert result.handle.num_tokens in (0, 3 * page_size)
    assert result.handle.pages.tolist() == [2, 0, 1][: result.handle.num_pages]
    assert result.num_existing_tokens == 0
    assert result.duplicate_pages.tolist() == []
    assert cache.num_evictable_pages == result.handle.num_pages
    assert sorted(cache.check_integrity()) == sorted(result.handle.pages)


def test_a_prefix_stays_while_it_is_locked_and_goes_after_the_last_unlock(cache: BasePrefixCache, page_size: int) -> None:
    handle = cache.insert(tokens(3 * page_size), pages(2, 0, 1)).handle
    cache.lock(handle)
    cache.lock(handle)
    cache.unlock(handle)
    assert cache.evict(10).tolist() == []
    assert cache.num_locked_pages == handle.num_pages
    cache.unlock(handle)
    assert sorted(cache.evict(10)) == sorted(handle.pages)


def test_a_second_unlock_is_refused(cache: BasePrefixCache, page_size: int) -> None:
    handle = cache.insert(tokens(page_size), pages(0)).handle
    other = cache.match(tokens(page_size))
    cache.lock(handle)
    cache.lock(other)
    cache.unlock(handle)
    with pytest.raises(IntegrityError, match="unlocked more often"):
        cache.unlock(handle)
    cache.unlock(other)


def test_a_handle_of_another_cache_is_refused(cache: BasePrefixCache, cache_type: str, page_size: int) -> None:
    for handle in (cache.insert(tokens(page_size), pages(0)).handle, cache.match(tokens(0))):
        with pytest.raises(IntegrityError):
            make_prefix_cache(cache_type, page_size).lock(handle)


def test_reset_is_refused_while_a_page_is_locked(cache: BasePrefixCache, page_size: int) -> None:
    handle = cache.insert(tokens(2 * page_size), pages(0, 1)).handle
    cache.lock(handle)
    if handle.num_pages:
        with pytest.raises(IntegrityError, match="2 locked pages"):
            cache.reset()
    cache.unlock(handle)
    assert sorted(cache.reset()) == sorted(handle.pages)
    assert cache.match(tokens(2 * page_size)).num_tokens == 0


def test_a_misshapen_insert_is_refused(cache: BasePrefixCache, page_size: int) -> None:
    for num_tokens, page_ids in [(page_size + 1, (0,)), (page_size, (0, 1)), (page_size, ())]:
        with pytest.raises(IntegrityError, match="tokens inserted"):
            cache.insert(tokens(num_tokens), pages(*page_ids))


def test_a_negative_eviction_is_refused(cache: BasePrefixCache) -> None:
    with pytest.raises(IntegrityError, match="-1"):
        cache.evict(-1)


def test_tenants_with_different_salts_share_nothing(cache: BasePrefixCache, page_size: int) -> None:
    cache.insert(tokens(page_size), pages(0), salt="a")
    assert cache.match(tokens(page_size)).num_tokens == 0
    assert cache.match(tokens(page_size), salt="b").num_tokens == 0
    assert cache.insert(tokens(page_size), pages(1), salt="b").duplicate_pages.tolist() == []


def test_256_requests_with_shared_prefixes_keep_the_ledger_exact(cache_type: str, page_size: int) -> None:
    """CASES 68: prefixes branch at random depths, requests finish or are aborted at random, the pool is too small for all."""
    rng = random.Random(page_size)
    ledger = Ledger(cache_type, page_size, num_pages=40)
    prompts = [tokens(rng.randint(1, 8 * page_size))]
    num_admitted = num_reused = 0
    while num_admitted < 256:
        stem = rng.choice(prompts)[: rng.randint(0, 8 * page_size)]
        prompt = np.concatenate([stem, tokens(rng.randint(1, 3 * page_size), first=1000 * rng.randint(1, 3))])[: 10 * page_size]
        request = ledger.admit(prompt, num_output_tokens=rng.randint(1, 2 * page_size))
        if request is not None:
            num_admitted += 1
            num_reused += request.num_cached_tokens > 0
            prompts.append(prompt)
            if rng.random() < 0.5:
                ledger.share(request, rng.randint(request.num_cached_tokens, len(prompt)))
        ledger.check()
        if ledger.running and (request is None or rng.random() < 0.3):
            rng.choice([ledger.finish, ledger.abort])(rng.choice(ledger.running))
            ledger.check()
    assert (num_reused > 30) is (cache_type == "radix")
    ledger.drain()


def test_an_unknown_type_and_a_page_size_below_one_are_refused(cache_type: str) -> None:
    with pytest.raises(ConfigError, match="'lru' found; allowed: radix, naive"):
        make_prefix_cache("lru", 16)
    with pytest.raises(ConfigError, match="page size 0"):
        make_prefix_cache(cache_type, 0)


PAGES_OF_A_RUN = """
import random, sys
import numpy as np
from minisgl.kvcache import PageAllocator, make_prefix_cache
rng, cache, allocator = random.Random(0), make_prefix_cache("radix", 4), PageAllocator(64)
for step in range(300):
    tokens = np.array([rng.randint(0, 1) for _ in range(4 * rng.randint(1, 8))], dtype=np.int32)
    allocator.free(cache.evict(max(0, 8 - allocator.num_free)))
    result = cache.insert(tokens, allocator.alloc(len(tokens) // 4), salt=rng.choice([None, "a", "b"]))
    allocator.free(result.duplicate_pages)
    print(result.handle.pages.tolist(), allocator.free_pages().tolist())
print("torch" in sys.modules)
"""


def test_page_ids_do_not_depend_on_the_hash_seed_and_torch_is_not_needed() -> None:
    """All ranks must get the same pages; CASES 77."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PAGES_OF_A_RUN],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 301
    assert outputs[0].endswith("False\n")
