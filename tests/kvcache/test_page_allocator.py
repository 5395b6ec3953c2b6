"""The free list: order, and refusal of everything that would break it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.errors import ConfigError, IntegrityError
from minisgl.kvcache import PageAllocator


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_pages_go_out_in_order_and_the_last_freed_first() -> None:
    allocator = PageAllocator(5)
    assert allocator.alloc(3).tolist() == [0, 1, 2]
    allocator.free(pages(0, 2))
    assert allocator.alloc(3).tolist() == [2, 0, 3]
    assert allocator.free_pages().tolist() == [4]
    assert allocator.alloc(0).dtype == np.int32


@pytest.mark.parametrize("num_pages", [4, -1])
def test_an_allocation_that_does_not_fit_is_refused(num_pages: int) -> None:
    allocator = PageAllocator(3)
    with pytest.raises(IntegrityError, match="0 to 3 are free"):
        allocator.alloc(num_pages)
    assert allocator.num_free == 3


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        (pages(0, 3), r"\[3\] freed while free"),
        (pages(0, 1, 0), r"\[0\] freed twice in one call"),
        (pages(0, 5), "0 to 4 exist"),
        (pages(-1), "0 to 4 exist"),
    ],
    ids=["free already", "named twice", "foreign", "negative"],
)
def test_a_wrong_free_is_refused_and_changes_nothing(freed: np.ndarray, message: str) -> None:
    allocator = PageAllocator(5)
    allocator.alloc(3)
    with pytest.raises(IntegrityError, match=message):
        allocator.free(freed)
    allocator.check_integrity()
    assert allocator.free_pages().tolist() == [4, 3]
    allocator.free(pages(0, 1, 2))
    assert allocator.num_free == 5


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1 KV pages"):
        PageAllocator(-1)


@given(st.integers(0, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_it_behaves_as_a_list_used_as_a_stack(num_pages: int, moves: list[tuple[bool, int]]) -> None:
    allocator, free, held = PageAllocator(num_pages), list(range(num_pages))[::-1], []
    for is_alloc, count in moves:
        if is_alloc:
            taken = [free.pop() for _ in range(min(count, len(free)))]
            assert allocator.alloc(len(taken)).tolist() == taken
            held += taken
        else:
            given_back, held = held[:count], held[count:]
            allocator.free(pages(*given_back))
            free += given_back
        allocator.check_integrity()
        assert allocator.num_free == len(free)
        assert allocator.free_pages().tolist() == free
