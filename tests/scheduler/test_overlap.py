"""Overlap: results of a step are handled while the next one runs, and what a step in flight computes for the ended is thrown away."""

from __future__ import annotations

import pytest

from tests.scheduler.fake_engine import FakeEngine, FakeScheduler, check_solo, make, solo


def steps_of(engine: FakeEngine, kind: str) -> list[int]:
    return [step for name, step in engine.events if name == kind]


def run_steady(**settings: object) -> FakeEngine:
    """Prompts in chunks, then decoding; there is always something to do."""
    scheduler, engine = make(**settings, max_extend_tokens=10)
    clients = [scheduler.add(range(1, 20 + i), max_tokens=10, ignore_eos=True) for i in range(4)]
    scheduler.finish()
    for client in clients:
        check_solo(client, engine.limits)
    return engine


def test_each_step_is_submitted_before_the_one_before_is_read() -> None:
    engine = run_steady(overlap=True, is_asynchronous=True)
    num_steps = len(engine.batches)
    wanted = [("submit", 0)]
    for step in range(1, num_steps):
        wanted += [("submit", step), ("read", step - 1)]
    assert engine.events == [*wanted, ("read", num_steps - 1)]


def test_in_plain_order_each_step_is_read_before_the_next_is_submitted() -> None:
    engine = run_steady(overlap=False)
    assert engine.events == [(name, step) for step in range(len(engine.batches)) for name in ("submit", "read")]


def test_an_asynchronous_engine_overlaps_unless_told_otherwise() -> None:
    assert run_steady(is_asynchronous=True).events[1] == ("submit", 1)
    assert run_steady(is_asynchronous=False).events[1] == ("read", 0)
    assert run_steady(is_asynchronous=True, overlap=False).events[1] == ("read", 0)


def test_the_environment_gives_the_plain_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", "1")
    plain = run_steady(overlap=True, is_asynchronous=True)
    assert plain.events == [(name, step) for step in range(len(plain.batches)) for name in ("submit", "read")]


@pytest.mark.parametrize(("is_overlapped", "num_rows"), [(True, 4), (False, 3)])
def test_a_request_that_stops_costs_at_most_one_discarded_row(is_overlapped: bool, num_rows: int) -> None:
    scheduler, engine = make(overlap=is_overlapped, is_asynchronous=is_overlapped)
    tokens, _ = solo([1, 2, 3], scheduler.add([1, 2, 3], ignore_eos=True, max_tokens=3).params, engine.limits, 0)
    assert len(set(tokens)) == 3, "the test needs a stop that comes third"
    scheduler.inbox.clear()
    client = scheduler.add([1, 2, 3], uid=0, ignore_eos=True, stop_token_ids=(tokens[2],))
    scheduler.finish()
    assert client.tokens == tokens
    assert client.ending is not None
    assert client.ending.finish_reason == "stop"
    assert sum(len(batch.sample_rows) for batch in engine.batches) == num_rows
    assert scheduler.page_counts.free + scheduler.page_counts.evictable == engine.limits.num_pages


def test_a_request_that_reaches_its_length_costs_no_discarded_row() -> None:
    scheduler, engine = make(overlap=True, is_asynchronous=True)
    client = scheduler.add([1, 2, 3], ignore_eos=True, max_tokens=5)
    scheduler.finish()
    check_solo(client, engine.limits)
    assert sum(len(batch.sample_rows) for batch in engine.batches) == 5


def test_a_slot_is_not_handed_on_before_the_step_in_flight_is_read() -> None:
    scheduler, engine = make(overlap=True, is_asynchronous=True, max_running_req=1)
    first = scheduler.add([1, 2, 3], ignore_eos=True, max_tokens=100)
    second = scheduler.add([4, 5], max_tokens=3, ignore_eos=True)
    for _ in range(4):
        scheduler.run_step()
    last_of_first = steps_of(engine, "submit")[-1]
    scheduler.abort(first)
    scheduler.finish()
    check_solo(second, engine.limits)
    assert len(first.tokens) == 3, "the row in flight at the abort is discarded"
    start_of_second = next(batch.step for batch in engine.batches if second.uid in batch.uids)
    assert engine.events.index(("read", last_of_first)) < engine.events.index(("submit", start_of_second))


def test_nobody_waits_for_a_message_while_a_step_is_in_flight() -> None:
    scheduler, engine = make(overlap=True, is_asynchronous=True)
    client = scheduler.add([1, 2, 3], max_tokens=1)
    scheduler.run_step()
    assert engine.events == [("submit", 0)]
    assert not scheduler.is_idle
    scheduler.run_step()
    assert not scheduler.has_asked_to_wait
    assert client.ending is not None
    scheduler.run_step()
    assert scheduler.has_asked_to_wait


def test_overlapped_and_plain_give_the_same_replies() -> None:
    def replies(is_overlapped: bool) -> list[list[int]]:
        scheduler, _ = make(overlap=is_overlapped, is_asynchronous=is_overlapped, num_pages=12, max_extend_tokens=7, reserve_tokens=1)
        clients = [scheduler.add([*range(1, 9), uid], max_tokens=12) for uid in range(8)]
        scheduler.finish()
        assert isinstance(scheduler, FakeScheduler)
        return [client.tokens for client in clients]

    assert replies(True) == replies(False)
