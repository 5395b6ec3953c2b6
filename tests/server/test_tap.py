"""The counter of endings can fail."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.server.local_server import Tap


class DeafScheduler:
    """Nothing more arrives."""

    def __init__(self, *aborted: int) -> None:
        self.aborts = Counter(aborted)

    def let_arrive(self, timeout: float) -> None:
        raise TimeoutError


def check(*, accepted=(1,), finals=(), aborted=(), is_broken=False):
    tap = Tap(None, None)
    tap.accepted.update(accepted)
    tap.finals.update(finals)
    tap.check(DeafScheduler(*aborted), is_broken=is_broken, timeout=0)


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"finals": (1, 1)},
        {"finals": (1, 2)},
        {"accepted": (1, 1), "finals": (1, 1)},
        {"aborted": (1, 1)},
        {"accepted": (1, 2), "finals": (1,)},
    ],
)
def test_too_few_and_too_many_endings_are_found(counts):
    with pytest.raises(AssertionError):
        check(**counts)


@pytest.mark.parametrize("counts", [{"finals": (1,)}, {"aborted": (1,)}, {"finals": (1,), "aborted": (1,)}, {"is_broken": True}])
def test_one_ending_is_right(counts):
    check(**counts)
