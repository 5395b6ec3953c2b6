"""A state machine that drives a prefix cache and its dictionary twin side by side and compares them after every call.

`machine_for(make_cache, page_size)` gives the class; `run` runs it. Pages come from a real `PageAllocator` of a few pages, so that
page ids are reused all the time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from minisgl.errors import IntegrityError
from minisgl.kvcache import BasePrefixCache, PageAllocator, PrefixHandle
from tests.kvcache.twin import DictionaryCache, Entry

NUM_PAGES = 16
SALTS = st.sampled_from([None, None, None, "a", "b"])
WORDS = st.lists(st.sampled_from([0, 0, 0, 0, 1, 2, 3]), min_size=1, max_size=6)
"""Mostly alike, so that prompts share much and part anywhere."""

BASES = st.none() | st.integers(0, 15)
MAX_PROMPT_PAGES = 8


def tokens_of(words: list[int], page_size: int) -> list[int]:
    """One page per word. Words differ in their page's first token, or only in its last, or (page size 1) in the only one."""
    tokens: list[int] = []
    for word in words:
        page = [0] * page_size
        page[0] += 2 * (word // 2)
        page[-1] += word % 2
        tokens += page
    return tokens


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except IntegrityError:
        return True
    return False


class CacheMachine(RuleBasedStateMachine):
    make_cache: Callable[[int], BasePrefixCache]
    page_size: int

    def __init__(self) -> None:
        super().__init__()
        self.cache = type(self).make_cache(self.page_size)
        self.twin = DictionaryCache(self.page_size)
        self.allocator = PageAllocator(NUM_PAGES)
        self.handles: list[tuple[PrefixHandle, list[Entry]]] = []

    def keep(self, handle: PrefixHandle, entries: list[Entry]) -> None:
        assert handle.pages.tolist() == [entry.page for entry in entries]
        assert handle.num_tokens == len(entries) * self.page_size
        if entries:
            self.handles.append((handle, entries))

    def prompt(self, base: int | None, words: list[int], salt: str | None) -> tuple[list[int], str | None]:
        """Tokens of whole pages, and a salt: the words, put after a cached prefix if `base` says which."""
        tokens = tokens_of(words, self.page_size)
        if base is None or not self.twin.entries:
            return tokens, salt
        salt, known = list(self.twin.entries)[base % len(self.twin.entries)]
        return ([*known, *tokens])[: MAX_PROMPT_PAGES * self.page_size], salt

    @rule(base=BASES, words=WORDS, salt=SALTS, num_tail=st.integers(0, 63))
    def match(self, base: int | None, words: list[int], salt: str | None, num_tail: int) -> None:
        tokens, salt = self.prompt(base, words, salt)
        tokens += [0] * (num_tail % self.page_size)
        self.keep(self.cache.match(np.array(tokens, dtype=np.int32), salt), self.twin.match(tokens, salt))

    @rule(base=BASES, words=WORDS, salt=SALTS, num_own=st.integers(0, 6))
    def insert(self, base: int | None, words: list[int], salt: str | None, num_own: int) -> None:
        """Insert as a request would that matched all but `num_own` pages of what is cached and computed the rest itself."""
        tokens, salt = self.prompt(base, words, salt)
        num_pages = len(tokens) // self.page_size
        self.evict_both(num_pages - self.allocator.num_free)
        known = [entry.page for entry in self.twin.peek(tokens, salt)]
        known = known[: max(0, len(known) - num_own)]
        if num_pages - len(known) > self.allocator.num_free:
            return
        pages = known + self.allocator.alloc(num_pages - len(known)).tolist()
        token_array, page_array = np.array(tokens, dtype=np.int32), np.array(pages, dtype=np.int32)
        result = self.cache.insert(token_array, page_array, salt)
        token_array[:], page_array[:] = -1, -1  # a row of the scheduler's table: it lives on
        entries, num_existing, duplicates = self.twin.insert(tokens, pages, salt)
        assert result.num_existing_tokens == num_existing
        assert result.duplicate_pages.tolist() == duplicates
        self.allocator.free(result.duplicate_pages)
        self.keep(result.handle, entries)

    def pick(self, index: int, wanted: Callable[[PrefixHandle, list[Entry]], bool]) -> tuple[PrefixHandle, list[Entry]] | None:
        """One of the handles that are wanted, the youngest first; None if there is none."""
        found = [pair for pair in reversed(self.handles) if wanted(*pair)]
        return found[index % len(found)] if found else None

    @rule(index=st.integers(0, 99))
    def lock(self, index: int) -> None:
        pair = self.pick(index, lambda handle, entries: all(entry.is_cached for entry in entries))
        if pair is not None:
            self.cache.lock(pair[0])
            self.twin.lock(pair[1])

    @rule(index=st.integers(0, 99))
    def lock_what_was_evicted(self, index: int) -> None:
        pair = self.pick(index, lambda handle, entries: not all(entry.is_cached for entry in entries))
        assert pair is None or refuses(lambda: self.cache.lock(pair[0]))

    @rule(index=st.integers(0, 99))
    def unlock(self, index: int) -> None:
        pair = self.pick(index, lambda handle, entries: handle.num_locks > 0)
        if pair is not None:
            self.cache.unlock(pair[0])
            self.twin.unlock(pair[1])

    @rule(index=st.integers(0, 99))
    def unlock_what_is_not_locked(self, index: int) -> None:
        pair = self.pick(index, lambda handle, entries: handle.num_locks == 0)
        assert pair is None or refuses(lambda: self.cache.unlock(pair[0]))

    @rule(num_pages=st.sampled_from([0, 1, 1, 2, 5]))
    def evict(self, num_pages: int) -> None:
        self.evict_both(num_pages)

    def evict_both(self, num_pages: int) -> None:
        pages = self.cache.evict(max(0, num_pages))
        assert sorted(pages.tolist()) == sorted(self.twin.evict(num_pages))
        self.allocator.free(pages)

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if self.twin.count(locked=True):
            assert refuses(self.cache.reset)
        elif chance == 5:
            pages = self.cache.reset()
            assert sorted(pages.tolist()) == sorted(self.twin.evict(NUM_PAGES))
            self.allocator.free(pages)

    @invariant()
    def ledger_adds_up(self) -> None:
        pages = self.cache.check_integrity().tolist()
        self.allocator.check_integrity()
        assert sorted(pages) == sorted(entry.page for entry in self.twin.entries.values())
        assert sorted(pages + self.allocator.free_pages().tolist()) == list(range(NUM_PAGES))
        assert self.cache.num_evictable_pages == self.twin.count(locked=False)
        assert self.cache.num_locked_pages == self.twin.count(locked=True)

    @invariant()
    def locked_pages_stay(self) -> None:
        for handle, entries in self.handles:
            if handle.num_locks:
                assert handle.pages.tolist() == [entry.page for entry in entries]
                assert all(entry.is_cached for entry in entries)

    def teardown(self) -> None:
        for handle, _ in self.handles:
            for _ in range(handle.num_locks):
                self.cache.unlock(handle)
        self.allocator.free(self.cache.reset())
        assert self.allocator.num_free == NUM_PAGES


def machine_for(make_cache: Callable[[int], BasePrefixCache], page_size: int) -> type[CacheMachine]:
    return type("Machine", (CacheMachine,), {"make_cache": staticmethod(make_cache), "page_size": page_size})


def run(make_cache: Callable[[int], BasePrefixCache], page_size: int, num_sequences: int, shrink: bool = True) -> None:
    """Run random call sequences, the same ones every time. Raises what the machine finds."""
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    options = settings(
        max_examples=num_sequences,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=checks,
    )
    run_state_machine_as_test(machine_for(make_cache, page_size), settings=options)
