"""The whole scheduler over random work, checked from outside after every turn; and proof that this finds planted bugs."""

from __future__ import annotations

import inspect
import logging
import sys
import textwrap
from collections.abc import Callable
from random import Random
from types import FunctionType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.table import RequestTable
from tests.scheduler.machine import Workload, draw_shape, run_seed

RANDOMS = st.randoms(use_true_random=False)
NUM_SEEDS = 200
"""random sequences by default; the others are slow"""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Duplicate uids are logged as errors; here they are meant."""
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(scope="module")
def works() -> list[Workload]:
    """The random work of the first seeds, each done to its end."""
    return [run_seed(seed) for seed in range(NUM_SEEDS)]


def test_random_work_ends_as_it_does_alone(works: list[Workload]) -> None:
    assert len(works) == NUM_SEEDS
    assert all(work.scheduler.is_idle for work in works)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("start", [NUM_SEEDS, *range(2000, 102_000, 10_000)])
def test_random_work_ends_as_it_does_alone_for_long(start: int) -> None:
    for seed in range(start, start + 10_000 if start >= 2000 else 2000):
        run_seed(seed)


def test_the_random_work_is_work(works: list[Workload]) -> None:
    """Retractions, prefix hits, evictions, discarded rows, chunks and refused uids do occur."""
    clients = [(work, client) for work in works for client in work.scheduler.clients]
    batches = [batch for work in works for batch in work.engine.batches]
    assert sum(work.scheduler.num_retractions for work in works) > 20
    assert sum(client.ending is not None and client.ending.num_cached_tokens > 0 for _, client in clients) > 30
    assert sum(work.num_sampled.get(client, 0) > len(client.tokens) for work, client in clients) > 50
    assert sum(client.is_aborted for _, client in clients) > 50
    assert sum(client.ending is not None and client.ending.finish_reason == "stop" for _, client in clients) > 50
    assert sum(len(work.scheduler.duplicates) for work in works) > 10
    assert sum(batch.num_rows > len(batch.sample_rows) for batch in batches) > 100
    assert sum(batch.num_rows > 1 for batch in batches) > 500


class SchedulerMachine(RuleBasedStateMachine):
    """The same work with hypothesis in charge, which shortens what it finds."""

    @initialize(random=RANDOMS)
    def start(self, random: Random) -> None:
        self.work = Workload(draw_shape(random))

    @rule(random=RANDOMS)
    def add(self, random: Random) -> None:
        self.work.add(random)

    @precondition(lambda self: self.work.scheduler.clients)
    @rule(random=RANDOMS)
    def abort(self, random: Random) -> None:
        self.work.abort(random)

    @rule(num_turns=st.integers(1, 4))
    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.work.turn()

    def teardown(self) -> None:
        if hasattr(self, "work"):
            self.work.drain()


@pytest.mark.parametrize("num_examples", [12, pytest.param(80, marks=pytest.mark.slow)])
def test_hypothesis_finds_nothing(num_examples: int) -> None:
    options = settings(
        max_examples=num_examples,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(SchedulerMachine, settings=options)


PLANTED_BUGS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "release_frees_shared_pages_too": (CacheManager.release, "[slot, num_shared : ", "[slot, 0 : "),
    "release_forgets_the_pages_that_are_not_shared": (CacheManager.release, "self._allocator.free(", "len("),
    "release_forgets_the_lock": (CacheManager.release, "self._prefix_cache.unlock(req.cache_handle)", "pass"),
    "duplicates_are_freed_while_the_row_names_them": (
        CacheManager.share_prefix,
        "table.write_pages(req.slot, 0, result.handle.pages)",
        "pass",
    ),
    "duplicates_are_freed_at_once": (CacheManager.share_prefix, "self._deferred.append((last_step, ", "self._allocator.free(*("),
    "duplicates_are_never_freed": (CacheManager.collect, "if entry[0] <= step", "if entry[0] < step - 99"),
    "the_old_lock_is_kept_when_a_chunk_is_shared": (CacheManager.share_prefix, "self._prefix_cache.unlock(req.cache_handle)", "pass"),
    "an_admitted_prefix_is_not_locked": (CacheManager.attach_prefix, "self._prefix_cache.lock(handle)", "pass"),
    "a_full_hit_leaves_no_token": (CacheManager.attach_prefix, "end = req.host_len - 1", "end = req.host_len"),
    "scored_prompts_use_the_cache": (CacheManager.attach_prefix, "min(end, req.num_scored)", "end"),
    "a_refused_prefix_stays_locked": (CacheManager.detach_prefix, "self._prefix_cache.unlock(req.cache_handle)", "pass"),
    "the_prompt_is_shared_before_it_is_computed": (Scheduler._share_prefixes, "min(num_tokens, req.host_len)", "req.host_len"),
    "the_finished_are_released_while_a_step_runs": (Scheduler._end, "> self._last_read:", "> 10**9:"),
    "tokens_of_discarded_rows_are_kept": (Scheduler._append_tokens, "if not is_live.all():", "if False:"),
    "a_retracted_request_loses_its_last_token": (Scheduler._retract_youngest, "req.num_retractions += 1", "req.lengths[1:3] -= 1"),
    "an_aborted_request_stays_in_the_queue": (PrefillManager.remove, "self.waiting.pop(req, None)", "pass"),
    "small_requests_overtake": (PrefillManager._admit_next, "next(iter(self.waiting))", "next(reversed(self.waiting))"),
    "chunks_exceed_the_budget": (PrefillManager.schedule, "budget -= num_tokens", "pass"),
    "rows_go_on_beyond_their_limit": (DecodeManager.schedule, "if can_go_on.all():", "if True:"),
    "rows_are_not_in_the_order_of_uids": (DecodeManager.schedule, "for uid in sorted(self.running)", "for uid in self.running"),
    "pages_are_counted_rounded_down": (
        RequestTable.num_pages_needed,
        "-(-lengths.astype(np.int64) // self.page_size)",
        "lengths // self.page_size",
    ),
    "a_page_is_taken_one_token_late": (RequestTable.is_short, " > self.num_pages", " - 1 > self.num_pages"),
    "the_engine_does_not_hear_of_canonical_pages": (RequestTable.write_pages, "self._mark(slot, first, end)", "self._mark(slot, end, end)"),
    "the_engine_hears_of_the_newest_pages_only": (RequestTable.append_pages, "np.where(low >= high, first, low)", "first"),
    "a_slot_is_handed_out_with_its_old_pages": (RequestTable.take_slot, "self.num_pages[slot] = 0", "pass"),
    "end_ids_of_the_last_request_remain": (RequestTable.take_slot, "not req.sampling_params.ignore_eos", "self.ends_at_eos[slot]"),
}


def plant(bug: tuple[Callable[..., Any], str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a passage in the source of a method, and the method by the result."""
    method, old, new = bug
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) == 1, (
        f"the planted bug's passage {old!r} stands {source.count(old)} times in {method.__qualname__}; rewrite it"
    )
    module = sys.modules[method.__module__]
    found: dict[str, FunctionType] = {}
    exec(
        compile(f"from __future__ import annotations\n{source.replace(old, new)}", inspect.getfile(method), "exec"), module.__dict__, found
    )
    monkeypatch.setattr(getattr(module, method.__qualname__.split(".")[0]), method.__name__, found[method.__name__])


def find_bug(num_seeds: int) -> BaseException | None:
    for seed in range(num_seeds):
        try:
            run_seed(seed)
        except Exception as error:  # a planted bug may show as anything
            return error
    return None


@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(PLANTED_BUGS[name], monkeypatch)
    assert find_bug(400) is not None, name


def test_planting_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for method, old, _ in PLANTED_BUGS.values():
        plant((method, old, old), monkeypatch)
    assert find_bug(20) is None
