"""The scheduler: hears messages, plans steps, commits their results. Every rank runs all of it on the same input.

One turn of the loop: hear, plan step N+1, launch it, and, while it runs, commit the results of step N. Nothing here reads a clock, a
random number or the environment after the start. Knows the engine only through `engine.base`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from minisgl.core import CACHED, FinishReason, Int32Array, Req, RequestState, TokenLogprobs
from minisgl.engine.base import BaseEngine, StepLogprobs
from minisgl.engine.config import DEFAULT_EXTEND_TOKENS
from minisgl.errors import IntegrityError, RequestError
from minisgl.kvcache import PageAllocator, make_prefix_cache
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    BatchTokenizerMsg,
    CacheFlushedMsg,
    DetokenizeMsg,
    ExitMsg,
    FlushBackendMsg,
    PromptLogprobsMsg,
    UserMsg,
)
from minisgl.scheduler import states
from minisgl.scheduler.agreement import NO_DIGESTS, StepLog, TracedAllocator
from minisgl.scheduler.cache import CacheManager, PageCounts
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.io import SchedulerIOMixin
from minisgl.scheduler.plan import Launched, Rows, build_batch, note_launch, prefill_rows
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.recording import Recorder, Schedule, StepObserver
from minisgl.scheduler.table import RequestTable

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)

MAX_PAGES_WALKED, LARGE_WALK_EVERY = 4096, 64
"""Above so many cached pages the ledger is walked in one of so many idle moments: a walk takes about 7 us a page, by
benchmark/prefix_cache.py, and a request that has just arrived would wait for it."""
NOT_FINITE = "the model computed numbers that are not finite; a number type of wider range (--dtype) may help"
DEFAULT_EXTEND_BESIDE_DECODE = {"cpu": 128, "cuda": 2048}


class Scheduler(SchedulerIOMixin):
    """One rank's scheduler. `run_forever` serves until an ExitMsg; `run_step` is one turn, for whoever drives it by hand."""

    def __init__(self, config: SchedulerConfig, engine: BaseEngine | None = None, *, observer: StepObserver | None = None) -> None:
        """Make the engine that `config` describes, unless one is given, and connect the transport.

        `observer` is told what is heard and done; without one, rank 0 records if `config.record` names a file. Raises ConfigError if that
        exists or cannot be made.
        """
        if engine is None:
            from minisgl.engine.engine import make_engine

            engine = make_engine(config, config.rendezvous_path)
        self.engine = engine
        """between steps one that stands around it may take its place, to watch"""
        limits = engine.limits
        self._table = RequestTable(limits.max_running_req, limits.max_seq_len, limits.page_size)
        prefix_cache = make_prefix_cache(config.cache_type, limits.page_size)
        self._log: StepLog | None = None
        """None where nobody compares: digests cost some microseconds a step"""
        is_recorded = config.record is not None and config.tp_info.is_primary()
        allocator = PageAllocator(limits.num_pages)
        if config.tp_info.size > 1 or is_recorded or observer is not None:
            allocator = traced = TracedAllocator(limits.num_pages)
            self._log = StepLog(traced, config.tp_info.rank)
        self._cache = CacheManager(allocator, prefix_cache, self._table)
        self._prefill = PrefillManager(self._table, self._cache, config.reserve_tokens, self.note_admission)
        self._decode = DecodeManager(self._table)
        self._max_extend_tokens = config.max_extend_tokens or DEFAULT_EXTEND_TOKENS[limits.device_type]
        self._max_extend_beside_decode = config.max_extend_tokens_beside_decode or (
            self._max_extend_tokens if config.offline_mode else DEFAULT_EXTEND_BESIDE_DECODE[limits.device_type]
        )
        self._is_overlapped = config.is_overlapped(limits.is_asynchronous)
        self._is_end_id = np.zeros(limits.vocab_size, dtype=np.bool_)
        self._is_end_id[sorted(i for i in limits.end_ids if i < limits.vocab_size)] = True
        self._reqs: dict[int, Req] = {}
        """all that have not ended, by uid"""
        self._ended: list[Req] = []
        """ended while a launched step touches them; released once it has been read"""
        self._in_flight: Launched | None = None
        self._num_steps = 0
        self._last_read = -1
        """the last step whose results have been handled"""
        self.num_retractions = 0
        self.num_integrity_errors = 0
        """found by the check when idle"""
        self._checked_generation = 0
        self._num_idle = 0
        self._raises_integrity_errors = config.raise_integrity_errors
        self._was_prefill = False
        self._is_exiting = False
        self._observer = self._make_recorder(config) if is_recorded and observer is None else observer
        super().__init__(config, engine.cpu_group)

    def _make_recorder(self, config: SchedulerConfig) -> Recorder:
        assert config.record is not None
        budgets = (self._max_extend_tokens, self._max_extend_beside_decode)
        schedule = Schedule(config.cache_type, config.reserve_tokens, *budgets, self._is_overlapped)
        return Recorder(config.record, config.tp_info.size, schedule, self.engine.limits)

    @property
    def num_unfinished(self) -> int:
        """Requests that have been taken and have not ended."""
        return len(self._reqs)

    @property
    def num_waiting(self) -> int:
        """Those of them that are in the queue and hold no slot."""
        return len(self._prefill.waiting)

    @property
    def is_idle(self) -> bool:
        """Nothing to run and nothing in flight."""
        return not self._reqs and self._in_flight is None

    @property
    def is_overlapped(self) -> bool:
        """A step is planned while the one before it runs."""
        return self._is_overlapped

    @property
    def page_counts(self) -> PageCounts:
        """Where the pages of the KV pool are now."""
        return self._cache.counts

    def run_forever(self) -> None:
        """Serve until an ExitMsg has come and all that was launched has been handled."""
        while self.run_step():
            pass

    def run_step(self) -> bool:
        """One turn: hear, plan, launch, commit. False once an ExitMsg has been obeyed."""
        if self._observer is not None:
            self._observer.begin_turn()
        for message in self.receive_msg(blocking=self.is_idle and not self._is_exiting):
            self._handle(message)
        if self._is_exiting:
            self._leave()
            return False
        launched = self._launch()
        if self._is_overlapped:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self._commit(launched)
        return True

    def close(self) -> None:
        """Close the sockets, leave the ranks' groups and end the recording. A second call does nothing."""
        super().close()
        self.engine.close()
        self.end_recording()

    def end_recording(self) -> None:
        """Nothing more is recorded; the file says that it ends here. May be called by another thread; a second call does nothing."""
        if self._observer is not None:
            self._observer.close()

    def write_last_steps(self, path: Path) -> None:
        """Write the last handled steps in plain, where ranks are compared. May be called by another thread."""
        if self._log is not None:
            self._log.write(path)

    def step_digests(self) -> Sequence[int]:
        """As the base class: of the last handled step, if there are several ranks."""
        return NO_DIGESTS if self._log is None else self._log.digests

    def check_agreement(self, theirs: Sequence[int]) -> None:
        """As the base class. Raises DivergedError if this rank has handled the step otherwise than rank 0."""
        if self._log is not None:
            self._log.check(theirs)

    def note_frames(self, frames: Iterable[bytes]) -> None:
        """As the base class."""
        if self._observer is not None:
            self._observer.note_frames(frames)

    def note_admission(self, req: Req) -> None:
        """Called when a request leaves the queue for the first time, with the tokens that the cache supplied. A subclass may count."""

    def note_handled(self, is_decode: bool) -> None:
        """Called when the results of a step have been handled. A subclass may measure time; nothing may depend on it."""

    def run_when_idle(self) -> None:
        """Check the whole ledger, unless nothing has changed since; a large one, whose walk takes a while, only now and then.

        What is wrong is logged and counted, and raised if so configured.
        """
        if self._cache.generation == self._checked_generation:
            return
        self._num_idle += 1
        if self.page_counts.evictable > MAX_PAGES_WALKED and self._num_idle % LARGE_WALK_EVERY:
            return
        self._checked_generation = self._cache.generation
        try:
            self.check_integrity()
        except IntegrityError as error:
            self.num_integrity_errors += 1
            logger.error("the page ledger is wrong (error %d since the start): %s", self.num_integrity_errors, error)
            if self._raises_integrity_errors:
                raise

    def check_integrity(self) -> None:
        """free + cached + held == total, no page in two places, every length in order. Raises IntegrityError."""
        self._cache.check_integrity()
        self._table.check_lengths()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; only while idle, else IntegrityError."""
        self._cache.reset()

    # ---- messages -------------------------------------------------------------------------------------------------------------

    def _handle(self, message: BaseBackendMsg) -> None:
        if isinstance(message, UserMsg):
            self._add(message)
        elif isinstance(message, AbortBackendMsg):
            req = self._reqs.get(message.uid)
            if req is not None:
                self._end(req, "abort")
        elif isinstance(message, FlushBackendMsg):
            self._flush_cache(message.uid)
        elif isinstance(message, ExitMsg):
            self._is_exiting = True
        else:
            raise IntegrityError(f"the transport handed over {type(message).__name__}, which is no scheduler message")

    def _add(self, message: UserMsg) -> None:
        """Queue a request, or answer at once with the reason why it can never run."""
        if message.uid in self._reqs:
            logger.error("uid %d is in use; its second request is dropped", message.uid)
            return
        prompt: Int32Array = np.asarray(message.input_ids, dtype=np.int32)
        try:
            max_device_len = self._check(prompt, message)
        except RequestError as error:
            self.send_result(_ending(message.uid, "error", error=str(error)))
            return
        end_ids = frozenset(message.sampling_params.stop_token_ids)
        req = Req.from_prompt(message.uid, prompt, message.sampling_params, max_device_len, end_ids)
        req.cache_salt = message.cache_salt
        self._reqs[req.uid] = req
        self._prefill.add(req)

    def _check(self, prompt: Int32Array, message: UserMsg) -> int:
        """The most tokens the request may reach; RequestError if it can never run."""
        limits = self.engine.limits
        most = min(limits.max_seq_len, limits.num_pool_tokens)
        if len(prompt) == 0:
            raise RequestError("the prompt is empty; at least one token is wanted")
        if int(prompt.min()) < 0 or int(prompt.max()) >= limits.vocab_size:
            raise RequestError(f"a token id is outside 0 to {limits.vocab_size - 1}")
        if len(prompt) >= most:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with one new token at most {limits.max_seq_len} fit the context and "
                f"{limits.num_pool_tokens} the KV pool"
            )
        wanted = message.sampling_params.max_tokens
        return most if wanted is None else min(most, len(prompt) + wanted)

    def _flush_cache(self, uid: int) -> None:
        """Empty the prefix cache, unless requests run. A step in flight that only ended ones are part of is handled first."""
        num_running = len(self._reqs)
        if not num_running:
            self._finish_in_flight()
            self.reset_prefix_cache()
        self.send_result(CacheFlushedMsg(uid, num_running))

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            launched, self._in_flight = self._in_flight, None
            self._commit(launched)

    def _leave(self) -> None:
        """Handle what is in flight, end every request, and answer for each."""
        self._finish_in_flight()
        for req in tuple(self._reqs.values()):
            self._end(req, "abort")
            self.send_result(_ending(req.uid, "abort", req, error="the server is shutting down"))

    # ---- planning -------------------------------------------------------------------------------------------------------------

    def _launch(self) -> Launched | None:
        """Plan the next step and submit it. None if there is nothing to do before the step in flight has been read."""
        rows = self._next_rows()
        if rows is None:
            return None
        step, self._num_steps = self._num_steps, self._num_steps + 1
        batch = build_batch(step, self._table, rows, self.engine.limits.end_ids)
        note_launch(self._table, rows, step)
        return Launched(batch, rows, self.engine.submit(batch))

    def _next_rows(self) -> Rows | None:
        """The next step. Where pages are short, the step in flight is read first, for it may give some back; then the youngest yields."""
        rows = self._rows_that_fit()
        while rows is None and self._reqs and self._in_flight is None:
            self._retract_youngest()
            rows = self._rows_that_fit()
        return rows

    def _rows_that_fit(self) -> Rows | None:
        """Prefill and decode steps alternate while both have work. None if nothing can be done now."""
        running = self._decode.schedule()
        if running is not None and (self._was_prefill or not self._prefill.has_work):
            return self._decode_rows(running)
        rows = self._prefill_rows()
        return self._decode_rows(running) if rows is None and running is not None else rows

    def _prefill_rows(self) -> Rows | None:
        budget = self._max_extend_tokens
        if self._decode.has_work:
            budget = min(budget, self._max_extend_beside_decode)
        chunks = sorted(self._prefill.schedule(budget), key=lambda chunk: chunk[0].uid)
        if not chunks:
            return None
        for req, num_tokens in chunks:
            if num_tokens == req.extend_len:
                self._prefill.remove(req)
                states.start_running(req)
                self._decode.add(req)
        self._was_prefill = True
        return prefill_rows(self._table, chunks)

    def _decode_rows(self, rows: Rows) -> Rows | None:
        """The rows with a page for each one's next token. None if pages are short."""
        is_short = self._table.is_short(rows.slots)
        if is_short.any():
            slots = rows.slots[is_short]
            if len(slots) > self._cache.num_available:
                return None
            self._cache.allocate(slots, np.ones(len(slots), dtype=np.int64))
        self._was_prefill = False
        return rows

    def _retract_youngest(self) -> None:
        """Take the pages of the request with the highest uid; it waits at the head of the queue with its tokens. Nothing is in flight."""
        holders = self._table.live_reqs()
        if len(holders) < 2:
            raise IntegrityError("the only request that holds pages does not fit the pool")
        req = max(holders, key=lambda holder: holder.uid)
        self._leave_queues(req)
        states.retract(req)
        self._release(req)
        req.lengths[CACHED] = 0
        req.num_retractions += 1
        self.num_retractions += 1
        self._prefill.put_back(req)

    # ---- results --------------------------------------------------------------------------------------------------------------

    def _commit(self, launched: Launched) -> None:
        """Handle the results of one step: prefixes are shared, tokens appended, the ended released, everyone answered."""
        tokens = launched.handle.read()
        self._last_read = launched.batch.step
        if not launched.rows.is_decode:
            self._share_prefixes(launched)
        logprobs = launched.handle.read_logprobs() if launched.has_logprobs else StepLogprobs((), ())
        scores = self._prompt_scores(launched, logprobs.prompt) if logprobs.prompt else []
        replies = self._append_tokens(launched.rows.sampled_slots, tokens, logprobs.sampled) if len(tokens) else []
        if not launched.rows.is_decode:
            self._note_cached_tokens(replies)
        if self._ended:
            self._release_ended()
        self._cache.collect(self._last_read)
        self._note_step(launched, tokens)
        self.note_handled(launched.rows.is_decode)
        if scores or replies:
            self.send_result(BatchTokenizerMsg(data=[*scores, *replies]))

    def _note_step(self, launched: Launched, tokens: Int32Array) -> None:
        if self._log is not None:
            handled = self._log.note(launched.batch, tokens)
            if self._observer is not None:
                self._observer.note_step(handled)

    def _note_cached_tokens(self, replies: list[DetokenizeMsg]) -> None:
        """Tell with a request's first token how much of its prompt was cached: a stop string may end it elsewhere, unheard here."""
        for reply in replies:
            if not reply.finished:
                reply.num_cached_tokens = self._reqs[reply.uid].num_cached_tokens

    def _prompt_scores(self, launched: Launched, logprobs: tuple[TokenLogprobs, ...]) -> list[PromptLogprobsMsg]:
        """One message per live row with the log probabilities of its chunk's prompt tokens."""
        ends = np.cumsum(launched.rows.extend)
        owners = np.searchsorted(ends, launched.batch.prompt_targets[:, 0], side="right")
        messages = []
        for row in np.unique(owners).tolist():
            slot = launched.rows.slots[row]
            if self._table.is_live[slot]:
                chosen = np.flatnonzero(owners == row).tolist()
                messages.append(PromptLogprobsMsg(int(self._table.uids[slot]), [logprobs[index] for index in chosen]))
        return messages

    def _share_prefixes(self, launched: Launched) -> None:
        """Chunks are computed: from now on other requests may use them."""
        cached_lens = launched.batch.cached_lens + launched.batch.extend_lens
        for slot, num_tokens in zip(launched.rows.slots.tolist(), cached_lens.tolist(), strict=True):
            req = self._table.reqs[slot]
            if req is not None and self._table.is_live[slot]:
                self._cache.share_prefix(req, min(num_tokens, req.host_len), int(self._table.last_step[slot]))

    def _append_tokens(self, slots: Int32Array, tokens: Int32Array, logprobs: tuple[TokenLogprobs | None, ...]) -> list[DetokenizeMsg]:
        """Give every live row its token; rows that ended while the step was in flight are discarded."""
        table = self._table
        is_live = table.is_live[slots]
        if not is_live.all():
            slots, tokens = slots[is_live], tokens[is_live]
            logprobs = tuple(entry for entry, keep in zip(logprobs, is_live, strict=False) if keep)
        broken: list[DetokenizeMsg] = []
        if len(tokens) and int(tokens.min()) < 0:
            is_right = tokens >= 0
            broken = self._end_broken(slots[~is_right])
            slots, tokens = slots[is_right], tokens[is_right]
            logprobs = tuple(entry for entry, keep in zip(logprobs, is_right, strict=False) if keep)
        lengths = table.host[slots]
        table.tokens[slots, lengths] = tokens
        lengths += 1
        table.host[slots] = lengths
        is_stopped = self._is_end_id[tokens] & table.ends_at_eos[slots]
        for row in table.has_end_ids[slots].nonzero()[0].tolist():
            req = table.reqs[slots[row]]
            is_stopped[row] |= req is not None and int(tokens[row]) in req.end_ids
        is_over = is_stopped | (lengths >= table.most[slots])
        uids = table.uids[slots].tolist()
        replies = [DetokenizeMsg(uid, token) for uid, token in zip(uids, tokens.tolist(), strict=True)]
        for row in is_over.nonzero()[0].tolist():
            req = self._reqs[uids[row]]
            reason: FinishReason = "stop" if is_stopped[row] else "length"
            replies[row] = _ending(req.uid, reason, req, token=int(tokens[row]))
            self._end(req, reason)
        for reply, entry in zip(replies, logprobs, strict=False):
            reply.logprobs = entry
        return broken + replies

    def _end_broken(self, slots: Int32Array) -> list[DetokenizeMsg]:
        """End requests whose logits are not finite, which would only go on as noise."""
        messages = []
        for slot in slots.tolist():
            req = self._table.reqs[slot]
            assert req is not None
            logger.error("the logits of request %d are not finite after %d tokens", req.uid, req.host_len)
            messages.append(_ending(req.uid, "error", req, error=NOT_FINITE))
            self._end(req, "error")
        return messages

    # ---- endings --------------------------------------------------------------------------------------------------------------

    def _end(self, req: Req, reason: FinishReason) -> None:
        """The request has ended. What it holds is released now, or once the last launched step that touches it has been read."""
        self._leave_queues(req)
        states.finish(req, reason)
        del self._reqs[req.uid]
        if req.slot < 0:
            return
        self._table.is_live[req.slot] = False
        if self._table.last_step[req.slot] > self._last_read:
            self._ended.append(req)
        else:
            self._release(req)

    def _leave_queues(self, req: Req) -> None:
        if req.state is RequestState.RUNNING:
            self._decode.remove(req)
        else:
            self._prefill.remove(req)

    def _release_ended(self) -> None:
        still_touched = []
        for req in self._ended:
            if self._table.last_step[req.slot] > self._last_read:
                still_touched.append(req)
            else:
                self._release(req)
        self._ended = still_touched

    def _release(self, req: Req) -> None:
        self._cache.release(req)
        self._table.return_slot(req)


def _ending(uid: int, reason: FinishReason, req: Req | None = None, *, token: int | None = None, error: str | None = None) -> DetokenizeMsg:
    """The last message about a request."""
    num_cached = req.num_cached_tokens if req is not None else 0
    return DetokenizeMsg(uid, token, finished=True, finish_reason=reason, num_cached_tokens=num_cached, error=error)
