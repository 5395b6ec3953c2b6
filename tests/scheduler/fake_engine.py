"""An engine without a model, and a scheduler around it: for tests that care who runs when, in which pages.

`FakeEngine` stores for every token its id and a mark, a number that depends on the whole sequence up to it, at `write_slots`; it reads
both back through its own page table, which only `table_updates` change. The sampled token is a function of the last mark. A page
that is mixed up, freed too early or named by a stale table therefore either breaks the chain of marks, which raises, or changes
tokens. It also depends on the request's seed, which comes with the plan's `setups`. `solo` is the twin: the same function of the
sequence alone, without pages.

Nothing here looks into a scheduler's private parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minisgl.core import Batch, SamplingParams, SlotSetup, TokenLogprobs
from minisgl.engine.base import EngineLimits, StepLogprobs
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    BaseTokenizerMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    PromptLogprobsMsg,
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


def sample(mark: Any, seed: Any, vocab_size: int) -> Any:
    return ((mark >> 8) + seed) % vocab_size


def solo(prompt: Sequence[int], params: SamplingParams, limits: EngineLimits, uid: int) -> tuple[list[int], str]:
    """(tokens, finish reason) of a request that has an engine to itself."""
    seed = uid if params.seed is None else params.seed
    mark = START
    for token in prompt:
        mark = next_mark(mark, token)
    most = min(limits.max_seq_len, limits.num_pool_tokens) - len(prompt)
    most = most if params.max_tokens is None else min(most, params.max_tokens)
    end_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else limits.end_ids)
    tokens: list[int] = []
    while len(tokens) < most:
        tokens.append(sample(mark, seed, limits.vocab_size))
        if tokens[-1] in end_ids:
            return tokens, "stop"
        mark = next_mark(mark, tokens[-1])
    return tokens, "length"


def score(token: Any, mark: Any) -> TokenLogprobs:
    """Of `token` after the sequence with this mark."""
    return TokenLogprobs(int(token), -float(mark))


@dataclass(eq=False)
class _Step:
    """A submitted plan and what the page table said of it when it was submitted."""

    batch: Batch
    engine: FakeEngine
    slots: np.ndarray
    """[B]"""
    ends: np.ndarray
    """[B] where each row ends in the next two"""
    places: np.ndarray
    """where each token of the rows is kept, row after row, this step's tokens included"""
    owners: np.ndarray
    """the row's slot for each of `places`"""
    is_new: np.ndarray
    """True for this step's tokens"""
    tokens: np.ndarray | None = None
    logprobs: StepLogprobs | None = None

    def read(self) -> np.ndarray:
        return self.engine.read(self)

    def read_logprobs(self) -> StepLogprobs:
        assert self.logprobs is not None, "log probabilities are read after the tokens"
        return self.logprobs


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
        self._setups: list[SlotSetup | None] = [None] * limits.max_running_req
        self._unread: deque[_Step] = deque()

    def submit(self, batch: Batch) -> _Step:
        for row, column, page in batch.table_updates.tolist():
            assert 0 <= page < self.limits.num_pages
            self._table[row, column] = page
        step = self._locate(batch)
        for other in self._unread:
            self._check_in_flight(step, other)
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

    def _locate(self, batch: Batch) -> _Step:
        """Look every token up in the page table; the plan must agree with it and with itself."""
        slots, cached, extend, size = batch.slots, batch.cached_lens, batch.extend_lens, self.limits.page_size
        assert list(batch.uids) == sorted(set(batch.uids)), "rows are ordered by uid"
        assert len(set(slots.tolist())) == batch.num_rows == len(extend)
        assert extend.min() >= 1
        lengths = cached + extend
        positions, owners = concat_ranges(np.zeros_like(lengths), lengths), slots.repeat(lengths)
        pages = self._table[owners, positions // size]
        assert pages.min() >= 0, "a row reads a page that it was never given"
        places = pages * size + positions % size
        is_new = positions >= cached.repeat(lengths)
        written = places[is_new].tolist()
        assert positions[is_new].tolist() == batch.positions.tolist()
        assert written == batch.write_slots.tolist(), "write_slots and the page table disagree"
        assert len(set(written)) == len(written), "two tokens are written to one place"
        return _Step(batch, self, slots, lengths.cumsum(), places, owners, is_new)

    def _check_in_flight(self, step: _Step, other: _Step) -> None:
        """What a step in flight may still use is not handed on: neither its pages nor its slots."""
        size = self.limits.page_size
        owner_of = np.full(self.limits.num_pages, -1)
        owner_of[other.places // size] = other.owners
        owners = owner_of[step.places[step.is_new] // size]
        assert ((owners == -1) | (owners == step.owners[step.is_new])).all(), "a page is written that a step in flight may still use"
        uids = dict(zip(other.slots.tolist(), other.batch.uids, strict=True))
        for slot, uid in zip(step.slots.tolist(), step.batch.uids, strict=True):
            assert uids.get(slot, uid) == uid, "a slot is handed on that a step in flight still uses"

    def _compute(self, step: _Step) -> None:
        batch, places = step.batch, step.places
        new = places[step.is_new]
        assert (batch.write_slots == new).all(), "the plan was changed after it had been submitted"
        ids = batch.input_ids.astype(np.int64)
        ids = np.where(ids == -1, self._last_tokens[step.owners[step.is_new]], ids)
        assert ids.min() >= 0
        assert ids.max() < self.limits.vocab_size
        self._ids[new] = ids
        before = self._marks_before(step)
        is_old = ~step.is_new
        assert (next_mark(before, self._ids[places]) == self._marks[places])[is_old].all(), "a page belongs to another sequence"
        self._marks[new] = marks = self._extend(before, step, ids)
        self._set_up(step)
        self._sample(step, marks)

    def _marks_before(self, step: _Step) -> np.ndarray:
        """The mark before each token; those after a new token are not known yet."""
        before = np.empty(len(step.places), dtype=np.int64)
        before[1:] = self._marks[step.places[:-1]]
        before[0] = before[step.ends[:-1]] = START
        return before

    def _extend(self, before: np.ndarray, step: _Step, ids: np.ndarray) -> np.ndarray:
        counts = step.batch.extend_lens
        starts = before[step.ends - counts]
        if len(ids) == len(starts):
            return next_mark(starts, ids)
        marks, todo = [], iter(ids.tolist())
        for mark, count in zip(starts.tolist(), counts.tolist(), strict=True):
            for _ in range(count):
                mark = next_mark(mark, next(todo))  # noqa: PLW2901 - the chain goes on
                marks.append(mark)
        return np.array(marks, dtype=np.int64)

    def _set_up(self, step: _Step) -> None:
        """Note how slots sample; what they are said to hold is what their rows hold."""
        for setup in step.batch.setups:
            row = step.places[step.owners == setup.slot]
            assert self._ids[row].tolist() == setup.prompt.tolist() + setup.output.tolist()
            self._setups[setup.slot] = setup

    def _sample(self, step: _Step, marks: np.ndarray) -> None:
        rows, targets = step.batch.sample_rows, step.batch.prompt_targets
        slots = step.slots[rows]
        setups = [setup for setup in (self._setups[slot] for slot in slots.tolist()) if setup is not None]
        assert len(setups) == len(slots), "a slot samples that was never set up"
        last = self._marks[step.places[step.ends[rows] - 1]]
        seeds = np.array([setup.seed % self.limits.vocab_size for setup in setups], dtype=np.int64)  # a seed may have all of 64 bits
        step.tokens = sample(last, seeds, self.limits.vocab_size)
        self._last_tokens[slots] = step.tokens
        wanted = [setup.params.logprobs is not None for setup in setups]
        sampled = [score(token, mark) if want else None for token, mark, want in zip(step.tokens, last, wanted, strict=True)]
        step.logprobs = StepLogprobs(tuple(sampled), tuple(score(token, marks[index]) for index, token, _ in targets))


@dataclass(eq=False)
class Client:
    """One request as it is seen from outside."""

    uid: int
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    """of prompt and output, in the order of their arrival"""
    ending: DetokenizeMsg | None = None
    is_aborted: bool = False
    num_cached_tokens: int | None = None
    """as told with the first token"""

    @property
    def is_open(self) -> bool:
        return self.ending is None and not self.is_aborted


class FakeScheduler(Scheduler):
    """A scheduler with both ends in the test's hand. Every reply is checked: its uid is known, has not ended, was not aborted."""

    def __init__(self, engine: Any, **settings: Any) -> None:
        self.inbox: list[tuple[BaseBackendMsg, Client | None]] = []
        self.clients: list[Client] = []
        """all that the scheduler has heard of, in the order of their messages"""
        self.duplicates: list[Client] = []
        """those whose uid was in use"""
        self.has_asked_to_wait = False
        """True if the last turn found nothing to do without a message"""
        self._current: dict[int, Client] = {}
        self._num_added = 0
        super().__init__(SchedulerConfig(model_path="unused", offline_mode=True, **settings), engine)

    def add(self, prompt: Sequence[int], uid: int | None = None, salt: str | None = None, **params: Any) -> Client:
        """Send a request; it is heard in the next turn."""
        client = Client(self._num_added if uid is None else uid, list(prompt), SamplingParams(**params))
        self._num_added += 1
        message = UserMsg(client.uid, np.array(client.prompt, dtype=np.int32), client.params, cache_salt=salt)
        self.inbox.append((message, client))
        return client

    def abort(self, client: Client) -> None:
        """Send an abort; it is heard in the next turn, by whoever has the uid then."""
        self.inbox.append((AbortBackendMsg(client.uid), client))

    def finish(self, max_turns: int = 10_000) -> None:
        """Turn until nothing runs."""
        for _ in range(max_turns):
            if self.is_idle and not self.inbox:
                return
            self.run_step()
        raise AssertionError(f"not idle after {max_turns} turns: {[client.uid for client in self.clients if client.is_open]}")

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        self.has_asked_to_wait = blocking and not self.inbox
        inbox, self.inbox = self.inbox, []
        for message, client in inbox:
            current = self._current.get(client.uid) if client is not None else None
            if isinstance(message, AbortBackendMsg):
                if current is not None and current.is_open:
                    current.is_aborted = True
            elif client is not None:
                if current is not None and current.is_open:
                    self.duplicates.append(client)
                else:
                    self._current[client.uid] = client
                    self.clients.append(client)
        return [message for message, _ in inbox]

    def offline_send_result(self, reply: BaseTokenizerMsg) -> None:
        for message in reply.data if isinstance(reply, BatchTokenizerMsg) else [reply]:
            assert isinstance(message, (DetokenizeMsg, PromptLogprobsMsg))
            client = self._current[message.uid]
            assert client.is_open, f"a reply for uid {message.uid} after its end: {message}"
            if isinstance(message, PromptLogprobsMsg):
                client.scores += message.logprobs
                continue
            client.scores += [message.logprobs] if message.logprobs is not None else []
            if client.num_cached_tokens is None:
                client.num_cached_tokens = message.num_cached_tokens
            client.tokens += [message.next_token] if message.next_token is not None else []
            assert message.finished == (message.finish_reason is not None)
            if message.finished:
                client.ending = message


def make(limits: EngineLimits = LIMITS, **settings: Any) -> tuple[FakeScheduler, FakeEngine]:
    """A scheduler and its engine; keywords are fields of EngineLimits or settings of the scheduler, `overlap` sets both."""
    names = set(EngineLimits.__dataclass_fields__)
    limits = replace(limits, **{name: value for name, value in settings.items() if name in names})
    engine = FakeEngine(limits)
    return FakeScheduler(engine, **{name: value for name, value in settings.items() if name not in names}), engine


def check_solo(client: Client, limits: EngineLimits) -> None:
    """The client got what a run alone gives; an aborted one got the beginning of that and no ending."""
    tokens, reason = solo(client.prompt, client.params, limits, client.uid)
    scores = solo_scores(client, tokens)
    if client.is_aborted:
        tokens, scores = tokens[: len(client.tokens)], scores[: len(client.scores)]
    assert client.tokens == tokens, f"uid {client.uid}: {client.tokens} instead of {tokens}"
    assert client.scores == scores, f"uid {client.uid}"
    if client.is_aborted:
        assert client.ending is None
    else:
        assert client.ending is not None, f"uid {client.uid} has no ending"
        assert client.ending.finish_reason == reason


def solo_scores(client: Client, tokens: list[int]) -> list[TokenLogprobs]:
    """The log probabilities that the client asked for: those of its prompt but the first token, then those of its output."""
    scores, mark = [], START
    sequence = client.prompt + tokens
    for index, token in enumerate(sequence):
        wanted = client.params.prompt_logprobs if index < len(client.prompt) else client.params.logprobs
        if index > 0 and wanted is not None:
            scores.append(score(token, mark))
        mark = next_mark(mark, token)
    return scores
