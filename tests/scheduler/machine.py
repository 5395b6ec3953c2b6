"""Random work for a scheduler with a fake engine, checked from outside after every turn.

`Workload` is the work and the checks, `run_seed` drives it from a seed. What is random is drawn from a `random.Random`, so that
hypothesis can supply one that it shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from minisgl.engine.base import EngineLimits
from tests.scheduler.fake_engine import Client, FakeEngine, FakeScheduler, check_solo

VOCAB_SIZE = 13
END_IDS = frozenset({0})
NUM_FAMILIES = 3


@dataclass(frozen=True)
class Shape:
    """A pool and the settings of a scheduler."""

    limits: EngineLimits
    settings: dict[str, Any]
    is_tight: bool = False
    """Many requests of about a page that cross into the next one, and pages for few of them: they are retracted"""


def draw_shape(random: Random) -> Shape:
    """Pools from two pages up, contexts shorter and longer than the pool, all kinds of budgets."""
    page_size = random.choice((1, 2, 16, 64))
    is_tight = random.random() < 0.3
    most_pages = random.choice((6, 12, 40 if page_size <= 2 else 12))
    num_pages = random.randint(4, 8) if is_tight else random.randint(2, most_pages)
    num_tokens = num_pages * page_size
    is_overlapped = random.random() < 0.6
    limits = EngineLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_seq_len=max(2, random.choice((num_tokens // 2, num_tokens - 1, num_tokens, 2 * num_tokens))),
        max_running_req=6 if is_tight else random.randint(1, 6),
        vocab_size=VOCAB_SIZE,
        end_ids=END_IDS,
        is_asynchronous=is_overlapped,
    )
    budget = max(random.choice((1, 2, 3, 7, 16, 40, 200)), num_tokens // 10)
    settings = {
        "overlap": is_overlapped,
        "cache_type": random.choice(("radix", "radix", "naive")),
        "reserve_tokens": 1 if is_tight else random.choice((1, 1, 3, 20)),
        "max_extend_tokens": budget,
        "max_extend_tokens_beside_decode": random.choice((1, 5, budget)),
    }
    return Shape(limits, settings, is_tight)


class Workload:
    """One scheduler, and everything that can be known about it from outside."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.engine = FakeEngine(shape.limits)
        self.scheduler = FakeScheduler(self.engine, **shape.settings)
        self.num_sampled: dict[Client, int] = {}
        """rows of each client that were submitted and sample; its presence says that it was admitted"""
        self._num_seen = 0
        self._num_events = 0
        self._in_flight: set[Client] = set()
        self._num_uids = 0

    @property
    def open_clients(self) -> list[Client]:
        return [client for client in self.scheduler.clients if client.is_open]

    def add(self, random: Random) -> None:
        """A request: a new start, a start that others share, or what somebody else said so far and then some."""
        if self.shape.is_tight:
            self._add_of_a_page(random)
            return
        limits, size = self.shape.limits, self.shape.limits.page_size
        most = min(limits.num_pool_tokens, limits.max_seq_len) - 1
        source = random.choice(self.scheduler.clients) if self.scheduler.clients and random.random() < 0.3 else None
        base = source.prompt + source.tokens if source else family(random.randrange(NUM_FAMILIES), 2 * limits.num_pool_tokens)
        shared = base[: random.choice((0, size, 2 * size, random.randint(0, 4 * size), len(base)))]
        num_own = random.choice((0, 1, 2, random.randint(0, 2 * size)))
        if random.random() < 0.5:  # end near the end of a page, where things happen
            num_own = max(0, (len(shared) + num_own) // size * size + random.randint(-2, 1) - len(shared))
        prompt = shared + [random.randrange(VOCAB_SIZE) for _ in range(num_own)]
        prompt = prompt[: most if random.random() < 0.97 else None] or [1]
        most_new = random.choice((1, 2, random.randint(1, 12), random.randint(1, 12), random.randint(1, 3 * size), None))
        params: dict[str, Any] = {"max_tokens": most_new}
        params["ignore_eos"] = random.random() < 0.5
        params["stop_token_ids"] = (random.randrange(VOCAB_SIZE),) if random.random() < 0.2 else ()
        params["seed"] = random.randrange(4) if random.random() < 0.5 else None
        params["logprobs"] = 0 if random.random() < 0.1 else None
        params["prompt_logprobs"] = 0 if random.random() < 0.1 else None
        self.scheduler.add(prompt, self._uid(random), **params)

    def _add_of_a_page(self, random: Random) -> None:
        size = self.shape.limits.page_size
        base = family(random.randrange(NUM_FAMILIES), size)
        prompt = base[: random.choice((0, size))] or [random.randrange(VOCAB_SIZE) for _ in range(size)]
        prompt = prompt[random.randint(0, 2) :] or [1]
        self.scheduler.add(prompt, self._uid(random), max_tokens=random.randint(2, 9), ignore_eos=random.random() < 0.8)

    def _uid(self, random: Random) -> int:
        """Mostly a new one; sometimes one that was used, or is in use and thus will be refused."""
        if self.scheduler.clients and random.random() < 0.1:
            uid = random.choice(self.scheduler.clients).uid
            if not self._is_pending(uid):
                return uid
        self._num_uids += 1
        return self._num_uids + (0 if random.random() < 0.9 else 1000)

    def abort(self, random: Random) -> None:
        clients = self.open_clients or self.scheduler.clients
        if clients and not self._is_pending((client := random.choice(clients)).uid):
            self.scheduler.abort(client)

    def _is_pending(self, uid: int) -> bool:
        """A message about this uid has not been heard yet. What a second one meets may have been refused meanwhile."""
        return uid in [client.uid for _, client in self.scheduler.inbox if client is not None]

    def turn(self) -> None:
        scheduler = self.scheduler
        assert scheduler.run_step()
        scheduler.check_integrity()
        events, self._num_events = self.engine.events[self._num_events :], len(self.engine.events)
        self._check_events(events)
        self._note_batches()
        self._check_pages()

    def _check_events(self, events: list[tuple[str, int]]) -> None:
        """Work is handed over before results are waited for, and no turn passes in which nothing happens."""
        if not events:
            assert not self.open_clients, "a turn without work though there was some"
        elif len(events) == 2:
            (first, submitted), (second, read) = events
            assert (first, second) == ("submit", "read")
            assert read == submitted - self.shape.settings["overlap"]
        else:
            assert self.shape.settings["overlap"], "in plain order each step is read at once"

    def _note_batches(self) -> None:
        """Count rows; who appears for the first time must not have overtaken anybody."""
        current = {client.uid: client for client in self.scheduler.clients}
        for batch in self.engine.batches[self._num_seen :]:
            clients = [current[uid] for uid in batch.uids]
            assert batch.num_tokens <= max(self.shape.settings["max_extend_tokens"], batch.num_rows * batch.is_decode)
            admitted = {client for client in clients if client not in self.num_sampled}
            for row, client in enumerate(clients):
                self.num_sampled[client] = self.num_sampled.get(client, 0) + int(row in batch.sample_rows)
            if admitted:
                waiting = [client for client in self.scheduler.clients if client.is_open and client not in self.num_sampled]
                order = self.scheduler.clients
                assert not waiting or max(map(order.index, admitted)) < order.index(waiting[0]), "somebody was overtaken"
            self._in_flight = set(clients)
        self._num_seen = len(self.engine.batches)

    def _check_pages(self) -> None:
        counts, size = self.scheduler.page_counts, self.shape.limits.page_size
        assert min(counts.free, counts.evictable, counts.locked, counts.deferred, counts.held) >= 0
        users = {client for client in self.scheduler.clients if client.is_open or client in self._in_flight}
        most = sum(-(-(len(client.prompt) + len(client.tokens) + 2) // size) for client in users)
        assert counts.locked + counts.held <= most, "pages are held for nobody"

    def drain(self) -> None:
        """Turn until all have ended; then everybody has what is due, and all pages are there."""
        num_tokens = sum(len(client.prompt) for client in self.scheduler.clients) + 20 * self.shape.limits.num_pool_tokens + 500
        for _ in range(20 * num_tokens):
            if self.scheduler.is_idle and not self.scheduler.inbox:
                break
            self.turn()
        assert self.scheduler.is_idle, f"uids {[client.uid for client in self.open_clients]} do not end"
        for client in self.scheduler.clients:
            self._check_client(client)
        for client in self.scheduler.duplicates:
            assert not client.tokens and client.ending is None  # noqa: PT018
        counts = self.scheduler.page_counts
        assert counts.free + counts.evictable == counts.total
        self.scheduler.reset_prefix_cache()
        self.scheduler.check_integrity()
        assert self.scheduler.page_counts.free == counts.total

    def _check_client(self, client: Client) -> None:
        limits = self.shape.limits
        if client.ending is not None and client.ending.finish_reason == "error":
            assert len(client.prompt) >= min(limits.num_pool_tokens, limits.max_seq_len)
            assert client not in self.num_sampled
            return
        check_solo(client, limits)
        num_discarded = self.num_sampled.get(client, 0) - len(client.tokens)
        is_late = self.shape.settings["overlap"] and (client.is_aborted or (client.ending and client.ending.finish_reason == "stop"))
        assert 0 <= num_discarded <= int(bool(is_late)), f"{num_discarded} rows discarded"


def family(index: int, num_tokens: int) -> list[int]:
    """The same tokens for the same index."""
    return Random(index).choices(range(VOCAB_SIZE), k=num_tokens)


def run_seed(seed: int, **fixed: Any) -> Workload:
    """One random sequence, the same for the same seed. `fixed` replaces settings of its shape."""
    random = Random(seed)
    shape = draw_shape(random)
    if "overlap" in fixed:
        shape = replace(shape, limits=replace(shape.limits, is_asynchronous=fixed["overlap"]))
    work = Workload(replace(shape, settings={**shape.settings, **fixed}))
    for _ in range(random.randint(1, 5)):
        for _ in range(random.choice((0, 1, 1, 2, 3)) + shape.is_tight):
            work.add(random)
        for _ in range(random.choice((0, 0, 0, 1, 2))):
            work.abort(random)
        for _ in range(random.choice((1, 1, 2, 5))):
            work.turn()
    work.drain()
    return work
