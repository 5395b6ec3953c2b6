"""The slow twin of the radix tree: a dictionary with one entry for every cached page, keyed by the whole prefix that ends with it.

No tree, no runs, no lists: each question is answered by looking at all entries. It is the oracle of the state machine.
"""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[str | None, tuple[int, ...]]


@dataclass(eq=False)
class Entry:
    """One page and the time of its last use."""

    key: Key
    page: int
    last_use: int
    num_locks: int = 0
    is_cached: bool = True


class DictionaryCache:
    """Says what a prefix cache should answer; a handle is the list of entries from the first page on."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.now = 0
        self.entries: dict[Key, Entry] = {}

    def peek(self, tokens: list[int], salt: str | None) -> list[Entry]:
        """The cached entries of the longest prefix; no use."""
        found = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            entry = self.entries.get((salt, tuple(tokens[:end])))
            if entry is None:
                break
            found.append(entry)
        return found

    def match(self, tokens: list[int], salt: str | None) -> list[Entry]:
        self.now += 1
        found = self.peek(tokens, salt)
        for entry in found:
            entry.last_use = self.now
        return found

    def insert(self, tokens: list[int], pages: list[int], salt: str | None) -> tuple[list[Entry], int, list[int]]:
        """(handle, number of existing tokens, duplicate pages)"""
        found = self.match(tokens, salt)
        num_existing = len(found)
        duplicates = [page for page, entry in zip(pages, found, strict=False) if page != entry.page]
        for index in range(num_existing, len(pages)):
            key = (salt, tuple(tokens[: (index + 1) * self.page_size]))
            self.entries[key] = Entry(key, pages[index], self.now)
            found.append(self.entries[key])
        return found, num_existing * self.page_size, duplicates

    def lock(self, handle: list[Entry]) -> None:
        for entry in handle:
            entry.num_locks += 1

    def unlock(self, handle: list[Entry]) -> None:
        self.now += 1
        for entry in handle:
            entry.num_locks -= 1
            if entry.num_locks == 0:
                entry.last_use = self.now

    def evict(self, num_pages: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < num_pages:
            parents = {(salt, tokens[: -self.page_size]) for salt, tokens in self.entries}
            leaves = [entry for key, entry in self.entries.items() if entry.num_locks == 0 and key not in parents]
            if not leaves:
                break
            oldest = min(leaves, key=lambda entry: entry.last_use)
            assert [entry.last_use for entry in leaves].count(oldest.last_use) == 1, "the twin itself must not know ties"
            oldest.is_cached = False
            pages.append(self.entries.pop(oldest.key).page)
        return pages

    def count(self, locked: bool) -> int:
        return sum((entry.num_locks > 0) is locked for entry in self.entries.values())
