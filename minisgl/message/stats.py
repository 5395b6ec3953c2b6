"""The scheduler's numbers on their way to the API: all counted since the start, so that one that is lost costs nothing.

Knows no process. Filled by scheduler rank 0, handed on by the detokenizer, shown by the API.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

WAIT_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Histogram(msgspec.Struct, array_like=True):
    """How many durations fell where. Adding one takes less than a microsecond."""

    bounds: list[float]
    """in seconds, ascending: a duration belongs to the first that is not below it"""
    counts: list[int]
    """one more than there are bounds: the last counts what is above all of them"""
    total: float = 0.0
    """the sum of all durations, in seconds"""

    @classmethod
    def of(cls, *bounds: float) -> Histogram:
        """An empty one."""
        return cls(list(bounds), [0] * (len(bounds) + 1))

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


class SchedulerStats(msgspec.Struct):
    """What rank 0 says of itself. A request is one choice of one prompt."""

    num_running: int = 0
    """requests that hold a slot now"""
    num_waiting: int = 0
    """requests in the queue now"""
    pool_usage: float = 0.0
    """the share of the KV pool's pages that requests use now, 0 to 1; a cached prefix that nobody uses is free to be taken"""
    num_retractions: int = 0
    """how often a request gave its pages back to others"""
    num_queried_tokens: int = 0
    """prompt tokens of requests that left the queue for the first time"""
    num_hit_tokens: int = 0
    """those of them that the prefix cache supplied"""
    queue_times: Histogram = msgspec.field(default_factory=lambda: Histogram.of(*WAIT_BOUNDS))
    """from when the scheduler heard a request until it left the queue for the first time"""
    prefill_times: Histogram = msgspec.field(default_factory=lambda: Histogram.of(*STEP_BOUNDS))
    """turns of the loop that handled a step with prompts"""
    decode_times: Histogram = msgspec.field(default_factory=lambda: Histogram.of(*STEP_BOUNDS))
    """turns of the loop that handled a step with one token of each"""

    @property
    def work_s(self) -> float:
        """Seconds that steps have taken."""
        return self.prefill_times.total + self.decode_times.total
