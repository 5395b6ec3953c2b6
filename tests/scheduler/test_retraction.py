"""Retraction: where pages are short the youngest yields, starts again from its tokens, and nobody outside notices."""

from __future__ import annotations

import pytest

from minisgl.engine.engine import make_engine
from minisgl.scheduler import SchedulerConfig
from tests.scheduler.fake_engine import FakeEngine, FakeScheduler, check_solo, make
from tests.tools.tiny_models import TinyModels


def restarts(engine: FakeEngine, uid: int) -> list[int]:
    """The steps in which the request was computed from a shorter length than it had reached."""
    found, reached = [], 0
    for batch in engine.batches:
        if uid in batch.uids:
            row = batch.uids.index(uid)
            if int(batch.cached_lens[row]) < reached:
                found.append(batch.step)
            reached = int(batch.cached_lens[row] + batch.extend_lens[row])
    return found


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_the_youngest_yields_and_all_end_as_alone(page_size: int, is_overlapped: bool, cache_type: str) -> None:
    scheduler, engine = make(
        page_size=page_size,
        num_pages=64 // page_size,
        overlap=is_overlapped,
        is_asynchronous=is_overlapped,
        reserve_tokens=1,
        cache_type=cache_type,
    )
    clients = [scheduler.add([uid + 1, 7, 7], max_tokens=40, ignore_eos=True) for uid in range(5)]
    while not scheduler.is_idle or scheduler.inbox:
        scheduler.run_step()
        scheduler.check_integrity()
    for client in clients:
        check_solo(client, engine.limits)
    assert scheduler.num_retractions > 0
    assert restarts(engine, 0) == [], "the oldest always runs"
    if cache_type == "naive":  # nothing of what was computed is found again
        assert restarts(engine, max(engine.batches[0].uids)) != [], "the youngest yields first"
    assert scheduler.page_counts.free + scheduler.page_counts.evictable == engine.limits.num_pages


def test_the_retracted_come_before_those_that_wait() -> None:
    scheduler, engine = make(page_size=1, num_pages=32, max_running_req=3, reserve_tokens=1, cache_type="naive")
    clients = [scheduler.add([uid + 1, 7, 7], max_tokens=20, ignore_eos=True) for uid in range(6)]
    scheduler.finish()
    assert restarts(engine, 2) != []
    first_of_3 = next(batch.step for batch in engine.batches if 3 in batch.uids)
    assert all(step < first_of_3 for uid in (1, 2) for step in restarts(engine, uid)[:1])
    for client in clients:
        check_solo(client, engine.limits)


def test_its_full_pages_go_to_the_prefix_cache_and_come_back() -> None:
    """A retracted request computes less than its whole sequence again if its pages were not needed meanwhile."""
    scheduler, engine = make(page_size=1, num_pages=40, reserve_tokens=1)
    clients = [scheduler.add([uid + 1] * 8, max_tokens=20, ignore_eos=True) for uid in range(2)]
    scheduler.finish()
    assert scheduler.num_retractions > 0
    again = [batch for batch in engine.batches if 1 in batch.uids and not batch.is_decode][1:]
    assert again
    assert all(batch.cached_lens[batch.uids.index(1)] > 0 for batch in again[:1])
    for client in clients:
        check_solo(client, engine.limits)


def test_what_the_cache_supplied_is_counted_at_the_first_admission_only() -> None:
    """A prompt retracted between its chunks finds its own chunks in the cache; nobody saved it that work."""
    scheduler, engine = make(page_size=1, num_pages=14, reserve_tokens=1, max_extend_tokens_beside_decode=1)
    old = scheduler.add([1, 2, 3, 4], max_tokens=8, ignore_eos=True)
    scheduler.run_step()
    young = scheduler.add([5, 6, 7, 8, 9, 10], max_tokens=2, ignore_eos=True)
    scheduler.finish()
    assert scheduler.num_retractions > 0
    assert sum(young.uid in batch.uids and not batch.is_decode for batch in engine.batches) > 3, "it is retracted between chunks"
    for client in (old, young):
        check_solo(client, engine.limits)
        assert client.ending is not None
        assert client.ending.num_cached_tokens == 0


def test_log_probabilities_of_a_retracted_request_come_once() -> None:
    scheduler, engine = make(page_size=1, num_pages=40, reserve_tokens=1, max_extend_tokens_beside_decode=3)
    clients = [scheduler.add([uid + 1] * 8, max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=0) for uid in range(4)]
    scheduler.finish()
    assert scheduler.num_retractions > 0
    for client in clients:
        check_solo(client, engine.limits)
        assert len(client.scores) == 7 + 20


def test_hundreds_yield_in_one_turn() -> None:
    scheduler, engine = make(page_size=1, num_pages=900, max_seq_len=900, max_running_req=400, reserve_tokens=1, max_extend_tokens=8192)
    clients = [scheduler.add([uid % 50], max_tokens=6, ignore_eos=True, seed=uid) for uid in range(400)]
    most_in_a_turn = 0
    while not scheduler.is_idle or scheduler.inbox:
        before = scheduler.num_retractions
        scheduler.run_step()
        most_in_a_turn = max(most_in_a_turn, scheduler.num_retractions - before)
    assert most_in_a_turn >= 100
    for client in clients:
        check_solo(client, engine.limits)


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_tiny_llama_in_a_tight_pool_says_what_it_says_alone(page_size: int, tiny_models: TinyModels) -> None:
    longest, num_new = 80, 24
    num_pages = int(1.2 * longest) // page_size
    config = SchedulerConfig(
        model_path=str(tiny_models("llama")), device="cpu", page_size=page_size, num_pages=num_pages, max_seq_len=longest, max_running_req=8
    )
    scheduler = FakeScheduler(make_engine(config), reserve_tokens=1)
    prompts = [[(uid * 37 + i * i) % 4000 for i in range(longest - num_new - 4 * uid)] for uid in range(8)]
    alone = []
    for prompt in prompts:
        client = scheduler.add(prompt, max_tokens=num_new, ignore_eos=True)
        scheduler.finish()
        alone.append(client.tokens)
        scheduler.reset_prefix_cache()
    assert scheduler.num_retractions == 0
    start = scheduler.page_counts
    together = [scheduler.add(prompt, max_tokens=num_new, ignore_eos=True) for prompt in prompts]
    while not scheduler.is_idle or scheduler.inbox:
        scheduler.run_step()
        scheduler.check_integrity()
    assert scheduler.num_retractions > 0
    assert [client.tokens for client in together] == alone
    assert all(len(client.tokens) == num_new for client in together)
    scheduler.reset_prefix_cache()
    assert scheduler.page_counts == start
