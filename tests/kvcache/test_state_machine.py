"""The radix tree against its dictionary twin, over random sequences of calls; and proof that this finds planted bugs."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.kvcache import BasePrefixCache, make_prefix_cache, radix
from tests.kvcache.machine import run

PAGE_SIZES = [1, 2, 16, 64]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_radix_equals_its_twin(page_size: int) -> None:
    run(lambda size: make_prefix_cache("radix", size), page_size, num_sequences=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_radix_equals_its_twin_for_long(page_size: int) -> None:
    run(lambda size: make_prefix_cache("radix", size), page_size, num_sequences=5_000)


PLANTED_BUGS = {
    "lock_forgets_the_matched_node_itself": (
        "for node in self._path(handle.node, handle.num_tokens):",
        "for node in self._path(handle.node, handle.num_tokens)[1:]:",
    ),
    "lock_leaves_the_node_evictable": ("                del self._lru[node]\n", ""),
    "lock_does_not_move_the_page_count": ("self._num_locked_pages += len(node.pages)", "pass"),
    "last_unlock_does_not_make_evictable": ("                self._lru[node] = None\n", ""),
    "double_unlock_goes_unnoticed": ("        handle.count_unlock()\n", "        handle.num_locks -= 1\n"),
    "evicted_prefix_can_be_locked": ("node if node.end == num_tokens else None", "node"),
    "split_drops_the_locks": ("end, node.num_locks)", "end)"),
    "split_leaves_the_lower_part_with_its_old_parent": ("        node.parent = upper\n", ""),
    "split_leaves_the_lower_part_with_all_pages": ("node.run[cut:], node.pages[num_pages:].copy()", "node.run[cut:], node.pages"),
    "split_leaves_the_lower_part_with_its_old_key": ("        node.key = self._edge_key(node.run, 0, node.key[0])\n", ""),
    "match_is_not_a_use": ("                self._lru.move_to_end(used)\n", ""),
    "parent_is_evicted_before_its_child": ("for used in path:", "for used in reversed(path):"),
    "run_is_not_compared_beyond_its_first_page": ("if not run.startswith(child.run, start):", "if len(run) < start + len(child.run):"),
    "a_page_that_differs_is_shared": ("return num_tokens // self.page_size", "return -(-num_tokens // self.page_size)"),
    "tenants_share": ("return salt, run[", "return None, run["),
    "insert_keeps_the_callers_pages": ("np.array(pages[num_existing_pages:], dtype=np.int32)", "pages[num_existing_pages:]"),
    "insert_reports_canonical_pages_as_duplicates": ("offered[offered != ", "offered[offered == "),
    "eviction_counts_tokens": ("num_missing = min(num_pages,", "num_missing = min(num_pages * self.page_size,"),
    "eviction_takes_the_front_of_a_run": (
        "evicted.append(leaf.pages[num_kept:])",
        "evicted.append(leaf.pages[: len(leaf.pages) - num_kept])",
    ),
    "eviction_takes_whole_runs": ("num_kept = max(0, len(leaf.pages) - num_missing)", "num_kept = 0"),
    "evicted_leaf_stays_its_parents_child": ("            del _parent(leaf).children[leaf.key]\n", ""),
    "shortened_run_keeps_its_end": ("        leaf.end -= (len(leaf.pages) - num_pages) * self.page_size\n", ""),
}


def load_radix_with(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], BasePrefixCache]:
    """The radix cache from its source with one passage replaced."""
    source = Path(radix.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"the planted bug's passage {old!r} stands {source.count(old)} times in radix.py; rewrite the bug"
    module = types.ModuleType("radix_with_a_planted_bug")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source.replace(old, new), radix.__file__, "exec"), module.__dict__)
    return module.RadixPrefixCache


def find_bug(make_cache: Callable[[int], BasePrefixCache], num_sequences: int = 100) -> Exception | None:
    try:
        run(make_cache, page_size=2, num_sequences=num_sequences, shrink=False)
    except Exception as error:  # a planted bug may show as anything
        return error
    return None


def test_the_loaded_source_itself_has_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    passage = "class RadixPrefixCache("
    assert find_bug(load_radix_with(passage, passage, monkeypatch), num_sequences=20) is None


@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_bug(load_radix_with(*PLANTED_BUGS[name], monkeypatch)) is not None, name
