"""What a scheduler does with one request, with many, and with messages that come at a bad time; a fake engine computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from minisgl.errors import IntegrityError
from minisgl.message import ExitMsg, UserMsg
from tests.scheduler.fake_engine import Client, FakeEngine, FakeScheduler, check_solo, make, solo

BOTH = pytest.mark.parametrize("is_overlapped", [False, True])


def overlap(is_overlapped: bool) -> dict[str, Any]:
    return {"overlap": is_overlapped, "is_asynchronous": is_overlapped}


def is_drained(scheduler: FakeScheduler) -> bool:
    counts = scheduler.page_counts
    scheduler.check_integrity()
    return scheduler.is_idle and counts.free + counts.evictable == counts.total


def turn(scheduler: FakeScheduler, num_turns: int = 1) -> None:
    for _ in range(num_turns):
        scheduler.run_step()
        scheduler.check_integrity()


def rows_of(engine: FakeEngine, client: Client) -> list[int]:
    """The steps that compute something for the client."""
    return [batch.step for batch in engine.batches if client.uid in batch.uids]


# ---- endings ------------------------------------------------------------------------------------------------------------------


@BOTH
def test_max_tokens_is_kept_and_clipped_to_context_and_pool(is_overlapped: bool) -> None:
    scheduler, engine = make(**overlap(is_overlapped), num_pages=16, page_size=4, max_seq_len=50)
    exact = scheduler.add([1] * 10, max_tokens=7, ignore_eos=True)
    rest = scheduler.add([2] * 10, ignore_eos=True)
    far = scheduler.add([3] * 10, max_tokens=2**31 - 1, ignore_eos=True)
    scheduler.finish()
    assert [len(client.tokens) for client in (exact, rest, far)] == [7, 40, 40]
    for client in (exact, rest, far):
        check_solo(client, engine.limits)


def test_end_ids_end_a_request_and_ignore_eos_lifts_those_of_the_model_only() -> None:
    scheduler, engine = make(vocab_size=10)
    params = [{}, {"ignore_eos": True}, {"stop_token_ids": (3,)}, {"ignore_eos": True, "stop_token_ids": (3,)}]
    clients = [scheduler.add([1, 2, uid], seed=5, **own) for uid in range(4, 9) for own in params]
    scheduler.finish()
    for client in clients:
        check_solo(client, engine.limits)
    assert {client.tokens[-1] for client in clients if client.ending.finish_reason == "stop"} == {0, 3}
    assert any(0 in client.tokens[:-1] for client in clients if client.params.ignore_eos)


@pytest.mark.parametrize(("num_pages", "max_seq_len"), [(2, 100), (100, 32), (2, 32)])
def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(num_pages: int, max_seq_len: int) -> None:
    scheduler, engine = make(num_pages=num_pages, page_size=16, max_seq_len=max_seq_len)
    fits, refused, long, after = (scheduler.add([1] * length) for length in (31, 32, 1000, 5))
    scheduler.finish()
    assert len(fits.tokens) == 1
    for client in (refused, long):
        assert client.ending.finish_reason == "error"
        assert client.tokens == []
        for number in (len(client.prompt), max_seq_len, num_pages * 16):
            assert str(number) in client.ending.error
    check_solo(after, engine.limits)
    assert is_drained(scheduler)


@pytest.mark.parametrize("prompt", [[], [-1], [1, 50], [2**31 - 1]])
def test_a_prompt_that_is_none_is_refused_and_others_go_on(prompt: list[int]) -> None:
    scheduler, engine = make(vocab_size=50)
    before, bad, after = scheduler.add([1, 2]), scheduler.add(prompt), scheduler.add([3])
    scheduler.finish()
    assert bad.ending.finish_reason == "error"
    assert bad.ending.error
    assert bad.uid not in {uid for batch in engine.batches for uid in batch.uids}
    for client in (before, after):
        check_solo(client, engine.limits)


def test_a_second_request_with_a_uid_in_use_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, engine = make()
    first = scheduler.add([1, 2, 3], uid=7, max_tokens=5, ignore_eos=True)
    second = scheduler.add([4], uid=7)
    with caplog.at_level(logging.ERROR):
        scheduler.finish()
    assert scheduler.duplicates == [second]
    assert "uid 7" in caplog.text
    check_solo(first, engine.limits)
    third = scheduler.add([5, 6], uid=7, max_tokens=5)
    scheduler.finish()
    check_solo(third, engine.limits)


# ---- aborts -------------------------------------------------------------------------------------------------------------------


def waiting(scheduler: FakeScheduler) -> Client:
    for _ in range(8):
        scheduler.add([9] * 5, ignore_eos=True)
    client = scheduler.add([1, 2, 3])
    turn(scheduler, 3)
    return client


def between_chunks(scheduler: FakeScheduler) -> Client:
    client = scheduler.add(range(1, 30))
    turn(scheduler, 2)
    return client


def with_the_final_chunk_in_flight(scheduler: FakeScheduler) -> Client:
    client = scheduler.add(range(1, 21))
    turn(scheduler, 2)
    return client


def running(scheduler: FakeScheduler) -> Client:
    client = scheduler.add(range(1, 15), ignore_eos=True)
    turn(scheduler, 6)
    return client


def not_heard_of(scheduler: FakeScheduler) -> Client:
    return scheduler.add([1, 2])


def ended(scheduler: FakeScheduler) -> Client:
    client = scheduler.add([1, 2], max_tokens=2)
    scheduler.finish()
    return client


def retracted(scheduler: FakeScheduler) -> Client:
    for uid in range(6):
        scheduler.add([uid + 1] * 20, ignore_eos=True)
    while scheduler.num_retractions == 0:
        turn(scheduler)
    return scheduler.clients[-1]


@BOTH
@pytest.mark.parametrize(
    "state", [waiting, between_chunks, with_the_final_chunk_in_flight, running, not_heard_of, ended, retracted], ids=lambda f: f.__name__
)
def test_an_abort_takes_effect_in_every_state(state: Callable[[FakeScheduler], Client], is_overlapped: bool) -> None:
    scheduler, engine = make(**overlap(is_overlapped), num_pages=40, max_extend_tokens=10, reserve_tokens=1)
    client = state(scheduler)
    num_tokens, num_rows = len(client.tokens), len(rows_of(engine, client))
    scheduler.abort(client)
    scheduler.abort(client)
    turn(scheduler, 3)
    assert len(client.tokens) == num_tokens, "no reply after the abort"
    assert len(rows_of(engine, client)) == num_rows, "no row after the abort"
    for other in scheduler.clients:
        scheduler.abort(other)
    scheduler.finish()
    assert is_drained(scheduler)
    for other in scheduler.clients:
        check_solo(other, engine.limits)
    again = scheduler.add(client.prompt, seed=client.uid, max_tokens=5)
    scheduler.finish()
    check_solo(again, engine.limits)


@BOTH
def test_an_abort_in_the_turn_of_the_last_token_releases_once(is_overlapped: bool) -> None:
    """Whichever turn the abort comes in: by the end, by length, by an end id."""
    for num_turns in range(1, 8):
        for params in ({"max_tokens": 3, "ignore_eos": True}, {"stop_token_ids": tuple(range(50))}):
            scheduler, engine = make(**overlap(is_overlapped), max_running_req=2)
            client = scheduler.add([1, 2, 3], **params)
            turn(scheduler, num_turns)
            scheduler.abort(client)
            turn(scheduler, 3)
            check_solo(client, engine.limits)
            assert is_drained(scheduler)
            both = [scheduler.add([uid], max_tokens=4) for uid in (5, 6)]
            scheduler.finish()
            for other in both:
                check_solo(other, engine.limits)
            assert any(len(batch.uids) == 2 for batch in engine.batches), "both slots are free again"


def test_a_uid_can_be_used_again_while_its_aborted_request_is_in_flight() -> None:
    scheduler, engine = make(**overlap(True))
    old = scheduler.add([1, 2, 3], uid=4, ignore_eos=True)
    turn(scheduler, 3)
    scheduler.abort(old)
    new = scheduler.add([5, 6, 7, 8], uid=4, max_tokens=9)
    scheduler.finish()
    assert old.is_aborted
    for client in (old, new):
        check_solo(client, engine.limits)


def test_a_request_that_fits_is_not_kept_waiting_for_a_longer_one_that_had_its_uid() -> None:
    scheduler, engine = make(page_size=1, num_pages=40, reserve_tokens=1)
    runner = scheduler.add([1, 2, 3], ignore_eos=True, max_tokens=30)
    long = scheduler.add([4] * 39, uid=9)
    turn(scheduler, 3)
    assert rows_of(engine, long) == []
    scheduler.abort(long)
    short = scheduler.add([5, 6], uid=9, max_tokens=3)
    turn(scheduler, 4)
    assert rows_of(engine, short) != []
    scheduler.finish()
    for client in (runner, short):
        check_solo(client, engine.limits)


def test_five_thousand_that_wait_leave_the_queue_when_aborted() -> None:
    scheduler, engine = make()
    runner = scheduler.add([1, 2, 3], max_tokens=30, ignore_eos=True)
    crowd = [scheduler.add([4, 5]) for _ in range(5000)]
    turn(scheduler, 2)
    for client in crowd:
        scheduler.abort(client)
    turn(scheduler, 2)
    assert scheduler.num_unfinished == 1
    scheduler.finish()
    check_solo(runner, engine.limits)


@BOTH
def test_exit_handles_what_is_in_flight_and_answers_everybody(is_overlapped: bool) -> None:
    scheduler, engine = make(**overlap(is_overlapped), max_running_req=2)
    clients = [scheduler.add([uid + 1] * 3, ignore_eos=True) for uid in range(4)]
    turn(scheduler, 4)
    clients.append(scheduler.add([1]))
    scheduler.inbox.append((ExitMsg(), None))
    num_submitted = len(engine.batches)
    assert not scheduler.run_step()
    assert len(engine.batches) == num_submitted
    assert [name for name, _ in engine.events].count("read") == num_submitted
    for client in clients:
        assert client.ending.finish_reason == "abort"
        assert client.tokens == solo(client.prompt, client.params, engine.limits, client.uid)[0][: len(client.tokens)]
    assert is_drained(scheduler)
    assert not scheduler.run_step()


# ---- prefixes and pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a_full_hit_leaves_one_token(length: int, page_size: int) -> None:
    scheduler, engine = make(page_size=page_size)
    clients = []
    for _ in range(2):
        clients.append(scheduler.add(range(1, length + 1), max_tokens=5, ignore_eos=True, seed=1))
        scheduler.finish()
    assert clients[0].tokens == clients[1].tokens
    assert clients[0].ending.num_cached_tokens == 0
    assert clients[1].ending.num_cached_tokens == (length - 1) // page_size * page_size
    assert clients[1].num_cached_tokens == clients[1].ending.num_cached_tokens, "told with the first token as well"
    check_solo(clients[1], engine.limits)


@BOTH
@pytest.mark.parametrize("page_size", [1, 4])
def test_two_that_compute_the_same_prefix_keep_their_text_when_pages_are_used_again(page_size: int, is_overlapped: bool) -> None:
    scheduler, engine = make(**overlap(is_overlapped), page_size=page_size, num_pages=400 // page_size, max_extend_tokens=16)
    twins = [scheduler.add(range(1, 21), max_tokens=100, ignore_eos=True, seed=seed) for seed in (1, 1, 2)]
    crowd = [scheduler.add([uid % 50, *range(uid % 7)], max_tokens=7) for uid in range(50)]
    while not scheduler.is_idle or scheduler.inbox:
        turn(scheduler)
    for client in twins + crowd:
        check_solo(client, engine.limits)
    assert is_drained(scheduler)


def test_a_chunk_is_shared_while_its_request_still_computes() -> None:
    scheduler, engine = make(page_size=1, max_extend_tokens=10, max_extend_tokens_beside_decode=10)
    first = scheduler.add(range(1, 41), max_tokens=2)
    turn(scheduler, 2)
    second = scheduler.add(range(1, 41), max_tokens=2)
    scheduler.finish()
    assert second.ending.num_cached_tokens >= 20
    for client in (first, second):
        check_solo(client, engine.limits)


def test_a_last_chunk_of_one_token_is_shared_too() -> None:
    scheduler, engine = make(page_size=4, max_extend_tokens=7)
    first = scheduler.add(range(1, 9), max_tokens=50, ignore_eos=True)
    turn(scheduler, 4)
    assert engine.batches[1].extend_lens.tolist() == [1]
    second = scheduler.add(range(1, 13), max_tokens=2)
    while second.ending is None:
        turn(scheduler)
    assert second.ending.num_cached_tokens == 8
    assert first.ending is None


def test_tenants_with_different_salts_share_nothing() -> None:
    scheduler, engine = make(page_size=4)
    found = []
    for salt in (None, "a", "b", "a", None):
        client = scheduler.add(range(1, 13), max_tokens=2, salt=salt)
        scheduler.finish()
        check_solo(client, engine.limits)
        found.append(client.num_cached_tokens)
    assert found == [0, 0, 0, 8, 8]


def test_a_wrong_ledger_is_logged_and_counted_when_idle_and_raised_if_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for raises in (False, True):
        scheduler, _ = make(raise_integrity_errors=raises)
        scheduler.run_when_idle()
        assert scheduler.num_integrity_errors == 0

        def find_error() -> None:
            raise IntegrityError("page 3 is in two places")

        scheduler.add([1, 2, 3], max_tokens=2)
        scheduler.finish()
        monkeypatch.setattr(scheduler, "check_integrity", find_error)
        with pytest.raises(IntegrityError) if raises else nullcontext():
            scheduler.run_when_idle()
        assert scheduler.num_integrity_errors == 1
    assert caplog.text.count("page 3 is in two places") == 2


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@BOTH
def test_pools_of_two_pages_serve_everybody(is_overlapped: bool, cache_type: str) -> None:
    for page_size in (1, 2, 16):
        scheduler, engine = make(**overlap(is_overlapped), page_size=page_size, num_pages=2, reserve_tokens=1, cache_type=cache_type)
        lengths = [1, page_size, 2 * page_size - 1, 1, page_size, 1]
        clients = [scheduler.add([uid + 1] * length, ignore_eos=True) for uid, length in enumerate(lengths)]
        while not scheduler.is_idle or scheduler.inbox:
            turn(scheduler)
        refused = [client for client in clients if client.ending.finish_reason == "error"]
        assert not any(len(client.prompt) < 2 * page_size for client in refused)
        for client in clients:
            check_solo(client, engine.limits)


def test_the_budget_counts_tokens_and_the_pool_counts_pages() -> None:
    scheduler, engine = make(page_size=16, num_pages=4, reserve_tokens=1)
    clients = [scheduler.add(range(1, length + 1), max_tokens=1) for length in (17, 33)]
    scheduler.finish()
    for client in clients:
        check_solo(client, engine.limits)
    assert rows_of(engine, clients[0])[-1] < rows_of(engine, clients[1])[0], "five pages are wanted, four are there"


def test_context_and_pool_limits_that_are_no_multiples_end_by_length() -> None:
    for prompt_len, num_pages, max_seq_len, max_tokens in (
        (1000, 69, 4096, 24),
        (1000, 64, 1024, None),
        (1000, 64, 1001, 500),
        (77, 5, 80, 3),
    ):
        scheduler, engine = make(page_size=16, num_pages=num_pages, max_seq_len=max_seq_len)
        client = scheduler.add([1] * prompt_len, max_tokens=max_tokens, ignore_eos=True)
        scheduler.finish()
        check_solo(client, engine.limits)
        assert client.ending.finish_reason == "length"


def test_256_default_requests_run_together_where_full_reservation_would_take_11() -> None:
    page_size, max_seq_len, num_pages = 16, 12_000, 8_600
    assert num_pages * page_size // max_seq_len == 11
    scheduler, engine = make(page_size=page_size, num_pages=num_pages, max_seq_len=max_seq_len, max_running_req=256, max_extend_tokens=8192)
    clients = [scheduler.add([uid % 50, 1 + uid // 50] + [3] * 8, ignore_eos=True) for uid in range(256)]
    turn(scheduler, 3)
    assert engine.batches[-1].num_rows == 256
    for client in clients:
        scheduler.abort(client)
    scheduler.finish()
    assert is_drained(scheduler)


# ---- order and budgets --------------------------------------------------------------------------------------------------------


@BOTH
def test_a_decode_stream_waits_at_most_two_steps_beside_a_feed_of_long_prompts(is_overlapped: bool) -> None:
    scheduler, engine = make(
        **overlap(is_overlapped), num_pages=4000, max_seq_len=1000, max_extend_tokens=100, max_extend_tokens_beside_decode=8
    )
    stream = scheduler.add([1, 2, 3], ignore_eos=True, max_tokens=400)
    turn(scheduler, 3)
    feed = [scheduler.add([uid + 2] * 800, max_tokens=1) for uid in range(5)]
    gaps, gap = [], 0
    while stream.ending is None:
        num_tokens = len(stream.tokens)
        scheduler.run_step()
        gap += 1
        if len(stream.tokens) > num_tokens:
            gaps.append(gap)
            gap = 0
    assert max(gaps) == 2
    assert any(client.ending is not None for client in feed), "the prompts get their share as well"
    beside = [batch.num_tokens for batch in engine.batches if not batch.is_decode][1:]
    assert max(beside) == 8


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    scheduler, engine = make(max_extend_tokens=20, max_extend_tokens_beside_decode=4)
    scheduler.add([1] * 50, max_tokens=1)
    scheduler.finish()
    assert [batch.num_tokens for batch in engine.batches] == [20, 20, 10]


def test_rows_are_ordered_by_uid_and_admission_by_message() -> None:
    scheduler, engine = make(max_running_req=2)
    clients = [scheduler.add([1, 2, uid], uid=uid, max_tokens=3, ignore_eos=True) for uid in (9, 3, 7, 1)]
    scheduler.finish()
    assert engine.batches[0].uids == (3, 9)
    firsts = [rows_of(engine, client)[0] for client in clients]
    assert firsts == sorted(firsts)


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    scheduler, engine = make(page_size=1, num_pages=40, reserve_tokens=1)
    scheduler.add([1] * 5, max_tokens=20, ignore_eos=True)
    large, small = scheduler.add([2] * 35, max_tokens=2), scheduler.add([3], max_tokens=2)
    scheduler.finish()
    assert rows_of(engine, large)[0] <= rows_of(engine, small)[0]
    for client in (large, small):
        check_solo(client, engine.limits)


def test_the_scheduler_keeps_no_hold_on_the_arrays_of_a_message() -> None:
    scheduler, engine = make()
    client = scheduler.add([1, 2, 3, 4, 5, 6], max_tokens=4)
    scheduler.run_step()
    message = UserMsg(1, np.array([7, 8, 9], dtype=np.int32), client.params)
    other = Client(1, [7, 8, 9], client.params)
    scheduler.inbox.append((message, other))
    scheduler.run_step()
    message.input_ids[:] = 1
    scheduler.finish()
    check_solo(other, engine.limits)
