"""What rank 0 counts of its own work, for the API's metrics: who waited how long, what the cache supplied, how long steps took.

Reads the clock, which the scheduler must not; nothing that the scheduler does depends on it. Knows no message. Called by the served
scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from minisgl.core import Req
from minisgl.message import Histogram, SchedulerStats
from minisgl.scheduler.cache import PageCounts

__all__ = ["StatsKeeper"]

SEND_EVERY_S = 1.0


class StatsKeeper:
    """The counters of one scheduler. A turn lasts from `begin_turn` to `end_turn`.

    With overlap it launches one step and handles the one before: its time counts for the step that it handles.
    """

    def __init__(self) -> None:
        self._stats = SchedulerStats()
        self._arrivals: deque[tuple[int, float]] = deque()
        """(uid, when it was heard) of requests that may be in the queue, in its order"""
        self._turn_began = 0.0
        self._handled: Histogram | None = None
        """where the turn belongs; None while it has handled no step"""
        self._next_send = 0.0

    def begin_turn(self, uids: Iterable[int]) -> None:
        """Requests of these uids have just arrived."""
        now = time.monotonic()
        self._turn_began = now
        self._arrivals.extend((uid, now) for uid in uids)

    def note_admission(self, req: Req) -> None:
        """It leaves the queue for the first time. Those that came before it and have not left it so never will."""
        self._stats.num_queried_tokens += req.num_prompt_tokens
        self._stats.num_hit_tokens += req.num_cached_tokens
        while self._arrivals:
            uid, arrived = self._arrivals.popleft()
            if uid == req.uid:
                self._stats.queue_times.add(time.monotonic() - arrived)
                return

    def note_handled(self, is_decode: bool) -> None:
        """The turn has handled a step."""
        self._handled = self._stats.decode_times if is_decode else self._stats.prefill_times

    def end_turn(self, *, is_idle: bool) -> bool:
        """Whether the numbers should be sent now: once a second, and before the scheduler waits for a message."""
        now = time.monotonic()
        if self._handled is not None:
            self._handled.add(now - self._turn_began)
            self._handled = None
        if is_idle:
            self._arrivals.clear()  # of requests that were refused or aborted
        if not is_idle and now < self._next_send:
            return False
        self._next_send = now + SEND_EVERY_S
        return True

    def stats(self, num_running: int, num_waiting: int, num_retractions: int, pages: PageCounts) -> SchedulerStats:
        """The counters, and beside them what the scheduler says of now. The same object each time: to be sent at once."""
        stats = self._stats
        stats.num_running, stats.num_waiting, stats.num_retractions = num_running, num_waiting, num_retractions
        stats.pool_usage = (pages.total - pages.free - pages.evictable) / pages.total
        return stats
