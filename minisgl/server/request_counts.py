"""What the API counts of the requests that pass it, by hand, since it happens for every token: less than a microsecond each.

A request is one choice of one prompt, as for the scheduler; what asks only for ids or a text is none. Knows replies and nothing of HTTP
or of Prometheus. Called by the frontend; shown by `metrics`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from minisgl.message import Histogram, SchedulerStats, UserReply

__all__ = ["Course", "RequestCounts"]

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
"""Seconds of work between two lines in the log."""
LATENCY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)


@dataclass(slots=True)
class Course:
    """How far one request has come."""

    began: float = field(default_factory=time.monotonic)
    is_accepted: bool = False
    """It was accepted and has not ended."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    last_token_at: float = 0.0


class RequestCounts:
    """Counters since the start."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        """accepted requests, by how they ended"""
        self.first_token_times = Histogram.of(*LATENCY_BOUNDS)
        self.gap_times = Histogram.of(*GAP_BOUNDS)
        self.request_times = Histogram.of(*LATENCY_BOUNDS)
        """of those that ended with stop or length"""
        self.scheduler = SchedulerStats()
        """what it said last"""
        self._logged = (0.0, 0, 0, 0, 0)

    def note(self, course: Course, reply: UserReply, now: float) -> None:
        """A reply has arrived at `now` (monotonic seconds)."""
        num_new = reply.num_completion_tokens - course.num_tokens
        if num_new > 0:
            if course.num_tokens:
                self.gap_times.add(now - course.last_token_at)
            else:
                self.num_prompt_tokens += course.num_prompt_tokens
                self.first_token_times.add(now - course.began)
            self.num_generated_tokens += num_new
            course.num_tokens = reply.num_completion_tokens
            course.last_token_at = now
        if reply.kind == "accepted":
            course.is_accepted, course.num_prompt_tokens = True, reply.num_prompt_tokens
        elif reply.kind == "final" and course.is_accepted:
            reason = reply.finish_reason or "error"
            self._end(course, reason)
            if reason in ("stop", "length"):
                self.request_times.add(now - course.began)

    def note_left(self, course: Course) -> None:
        """Nobody waits for the request any more; one that has ended is left too."""
        if course.is_accepted:
            self._end(course, "abort")

    def _end(self, course: Course, reason: str) -> None:
        course.is_accepted = False
        self.num_ended[reason] += 1

    def take_scheduler(self, stats: SchedulerStats) -> None:
        """The scheduler's numbers have arrived. Every ten seconds of work they give a line in the log."""
        self.scheduler = stats
        now = (stats.work_s, self.num_prompt_tokens, self.num_generated_tokens, stats.num_queried_tokens, stats.num_hit_tokens)
        seconds, num_in, num_out, num_queried, num_hit = (new - old for new, old in zip(now, self._logged, strict=True))
        if seconds >= LINE_EVERY_S:
            self._logged = now
            logger.info(
                "%.1f s of work: %.1f tokens/s in, %.1f tokens/s out; now %d running, %d waiting, %.1f %% of the pool in use; "
                "%.1f %% of the prompts' tokens were cached",
                *(seconds, num_in / seconds, num_out / seconds, stats.num_running, stats.num_waiting, 100 * stats.pool_usage),
                100 * num_hit / max(num_queried, 1),
            )
