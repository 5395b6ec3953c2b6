"""An engine without a model, and a scheduler around it: for tests that care who runs when, in which pages.

`FakeEngine` stores for every token its id and a mark, a number that depends on the whole sequence up to it, at `write_slots`; it reads
both back through its own page table, which only `table_updates` change. The sampled token is a function of the last mark. A page
that is mixed up, freed too early or named by a stale table therefore either breaks the chain of marks, which raises, or changes
tokens. `solo` is the twin: the same function of the sequence alone, without pages.

Nothing here looks into a scheduler's private parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minisgl.core import Batch, SamplingParams
from minisgl.engine.base import EngineLimits
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    BaseTokenizerMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    UserMsg,
)
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.table import concat_ranges

MODULUS = 2**31 - 1
FACTOR = 48271
START = 12345
"""The mark before the first token."""

LIMITS = EngineLimits(num_pages=64, page_size=4, max_seq_len=256, max_running_req=8, vocab_size=50, end_ids=frozenset({0}))


def next_mark(mark: Any, token: Any) -> Any:
    return (mark * FACTOR + token + 1) % MODULUS


def sample(mark: Any, vocab_size: int) -> Any:
    return (mark >> 8) % vocab_size


def solo(prompt: Sequence[int], params: SamplingParams, limits: EngineLimits) -> tuple[list[int], str]:
    """(tokens, finish reason) of a request that has an engine to itself."""
    mark = START
    for token in prompt:
        mark = next_mark(mark, token)
    most = min(limits.max_seq_len, limits.num_pool_tokens) - len(prompt)
    most = most if params.max_tokens is None else min(most, params.max_tokens)
    end_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else limits.end_ids)
    tokens: list[int] = []
    while len(tokens) < most:
        tokens.append(sample(mark, limits.vocab_size))
        if tokens[-1] in end_ids:
            return tokens, "stop"
        mark = next_mark(mark, tokens[-1])
    return tokens, "length"


@dataclass(eq=False)
class _Step:
    """A submitted plan and what the page table said of it when it was submitted."""

    batch: Batch
    engine: FakeEngine
    old_slots: np.ndarray
    """where the tokens before this step are, row after row"""
    new_slots: np.ndarray
    """where this step's tokens go, row after row"""
    tokens: np.ndarray | None = None

    def read(self) -> np.ndarray:
        return self.engine.read(self)


class FakeEngine:
    """Tokens are a pure function of the sequence. `limits.is_asynchronous`: a step is computed when its result is read."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.cpu_group = None
        self.events: list[tuple[str, int]] = []
        """("submit" | "read", step), in the order of the calls"""
        self.batches: list[Batch] = []
        self._table = np.full((limits.max_running_req, -(-limits.max_seq_len // limits.page_size)), -1, dtype=np.int64)
        self._ids = np.full(limits.num_pool_tokens, -1, dtype=np.int64)
        self._marks = np.full(limits.num_pool_tokens, -1, dtype=np.int64)
        self._last_tokens = np.full(limits.max_running_req, -1, dtype=np.int64)
        self._unread: deque[_Step] = deque()

    def submit(self, batch: Batch) -> _Step:
        for row, column, page in batch.table_updates.tolist():
            assert 0 <= page < self.limits.num_pages
            self._table[row, column] = page
        step = _Step(batch, self, *self._locate(batch))
        self._check(step)
        self.events.append(("submit", batch.step))
        self.batches.append(batch)
        self._unread.append(step)
        if not self.limits.is_asynchronous:
            self._compute(step)
        return step

    def read(self, step: _Step) -> np.ndarray:
        assert self._unread
        assert self._unread.popleft() is step, "steps are read once, in order"
        if step.tokens is None:
            self._compute(step)
        assert step.tokens is not None
        self.events.append(("read", step.batch.step))
        return step.tokens.astype(np.int32)

    def _locate(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        size = self.limits.page_size
        parts = []
        for starts, counts in ((np.zeros_like(batch.cached_lens), batch.cached_lens), (batch.cached_lens, batch.extend_lens)):
            positions, owners = concat_ranges(starts, counts), np.repeat(batch.slots, counts)
            pages = self._table[owners, positions // size]
            assert (pages >= 0).all(), "a row reads a page that it was never given"
            parts.append(pages * size + positions % size)
        assert (positions == batch.positions).all()
        return parts[0], parts[1]

    def _check(self, step: _Step) -> None:
        """The plan agrees with itself, and no page is written that a step in flight may still use for another request."""
        batch, size = step.batch, self.limits.page_size
        assert list(batch.uids) == sorted(set(batch.uids)), "rows are ordered by uid"
        assert len(set(batch.slots.tolist())) == batch.num_rows == len(batch.extend_lens)
        assert (batch.extend_lens >= 1).all()
        assert (batch.write_slots == step.new_slots).all(), "write_slots and the page table disagree"
        assert len(np.unique(step.new_slots)) == len(step.new_slots), "two tokens are written to one place"
        if not self._unread:
            return
        written = np.stack((np.repeat(batch.slots, batch.extend_lens), step.new_slots // size))
        for other in self._unread:
            owners = np.concatenate((np.repeat(other.batch.slots, other.batch.cached_lens), np.repeat(other.batch.slots, other.batch.extend_lens)))
            used = np.concatenate((other.old_slots, other.new_slots)) // size
            owner_of = np.full(self.limits.num_pages, -1)
            owner_of[used] = owners
            owner = owner_of[written[1]]
            assert ((owner == -1) | (owner == written[0])).all(), "a page is written that a step in flight may still use"
            kept = {slot: uid for slot, uid in zip(other.batch.slots.tolist(), other.batch.uids, strict=True)}
            assert all(kept.get(slot, uid) == uid for slot, uid in zip(batch.slots.tolist(), batch.uids, strict=True)), "slot reused in flight"

    def _compute(self, step: _Step) -> None:
        batch = step.batch
        assert (batch.write_slots == step.new_slots).all(), "the plan was changed after it had been submitted"
        ids = batch.input_ids.astype(np.int64)
        owners = np.repeat(batch.slots, batch.extend_lens)
        ids = np.where(ids == -1, self._last_tokens[owners], ids)
        assert ((ids >= 0) & (ids < self.limits.vocab_size)).all()
        self._check_chains(step)
        ends = np.cumsum(batch.cached_lens)
        before = np.full(batch.num_rows, START, dtype=np.int64)
        has_past = batch.cached_lens > 0
        before[has_past] = self._marks[step.old_slots[ends[has_past] - 1]]
        marks = self._extend(before, ids, batch.extend_lens)
        self._ids[step.new_slots], self._marks[step.new_slots] = ids, marks
        last = marks[np.cumsum(batch.extend_lens) - 1][batch.sample_rows]
        step.tokens = sample(last, self.limits.vocab_size)
        self._last_tokens[batch.slots[batch.sample_rows]] = step.tokens

    def _check_chains(self, step: _Step) -> None:
        """Every cached position continues the sequence of the position before it."""
        ids, marks = self._ids[step.old_slots], self._marks[step.old_slots]
        before = np.roll(marks, 1)
        counts = step.batch.cached_lens
        before[(np.cumsum(counts) - counts)[counts > 0]] = START
        assert (next_mark(before, ids) == marks).all(), "a page in the middle of a row belongs to another sequence"

    def _extend(self, before: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        if len(ids) == len(before):
            return next_mark(before, ids)
        marks, todo = [], iter(ids.tolist())
        for mark, count in zip(before.tolist(), counts.tolist(), strict=True):
            for _ in range(count):
                mark = next_mark(mark, next(todo))  # noqa: PLW2901 - the chain goes on
                marks.append(mark)
        return np.array(marks, dtype=np.int64)


@dataclass
class Client:
    """One request from outside."""

    uid: int
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    ending: DetokenizeMsg | None = None
    is_aborted: bool = False

    @property
    def is_open(self) -> bool:
        return self.ending is None and not self.is_aborted


class FakeScheduler(Scheduler):
    """A scheduler with both ends in the test's hand. Every reply is checked: its uid is known, has not ended, was not aborted."""

    def __init__(self, engine: Any, **settings: Any) -> None:
        self.inbox: list[BaseBackendMsg] = []
        self.clients: dict[int, Client] = {}
        """the newest client of each uid"""
        self.would_block = False
        """True if the last turn asked for a message to wait for"""
        super().__init__(SchedulerConfig(model_path="unused", offline_mode=True, **settings), engine)

    def add(self, prompt: Sequence[int], uid: int | None = None, **params: Any) -> Client:
        uid = len(self.clients) if uid is None else uid
        client = Client(uid, list(prompt), SamplingParams(**params))
        self.clients[uid] = client
        self.inbox.append(UserMsg(uid, np.array(client.prompt, dtype=np.int32), client.params))
        return client

    def abort(self, client: Client) -> None:
        self.inbox.append(AbortBackendMsg(client.uid))

    def finish(self, max_turns: int = 10_000) -> None:
        """Turn until nothing runs."""
        for _ in range(max_turns):
            if self.is_idle and not self.inbox:
                return
            self.run_step()
        raise AssertionError(f"not idle after {max_turns} turns: {[c for c in self.clients.values() if c.is_open]}")

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        self.would_block = blocking
        messages, self.inbox = self.inbox, []
        for message in messages:
            if isinstance(message, AbortBackendMsg) and message.uid in self.clients and self.clients[message.uid].ending is None:
                self.clients[message.uid].is_aborted = True
        return messages

    def offline_send_result(self, reply: BaseTokenizerMsg) -> None:
        for message in reply.data if isinstance(reply, BatchTokenizerMsg) else [reply]:
            assert isinstance(message, DetokenizeMsg)
            client = self.clients[message.uid]
            assert client.is_open, f"a reply for uid {message.uid} after its end: {message}"
            assert message.finished == (message.finish_reason is not None)
            if message.next_token is not None:
                client.tokens.append(message.next_token)
            if message.finished:
                client.ending = message


def make(limits: EngineLimits = LIMITS, **settings: Any) -> tuple[FakeScheduler, FakeEngine]:
    """A scheduler and its engine; keywords are fields of EngineLimits or settings of the scheduler, `overlap` sets both."""
    names = set(EngineLimits.__dataclass_fields__)
    limits = replace(limits, **{name: value for name, value in settings.items() if name in names})
    engine = FakeEngine(limits)
    return FakeScheduler(engine, **{name: value for name, value in settings.items() if name not in names}), engine


def check_solo(client: Client, limits: EngineLimits) -> None:
    """The client's tokens and ending are those of a run alone; an aborted one has the first of them and no ending."""
    tokens, reason = solo(client.prompt, client.params, limits)
    if client.is_aborted:
        assert client.tokens == tokens[: len(client.tokens)]
        assert client.ending is None
        return
    assert client.tokens == tokens, f"uid {client.uid}: {client.tokens} instead of {tokens}"
    assert client.ending is not None
    assert client.ending.finish_reason == reason
