"""Ctrl-C and failures in the middle of work: the object stays usable, and nothing is left behind."""

from __future__ import annotations

import signal
import threading

import pytest

from minisgl.core import SamplingParams
from minisgl.llm.interrupts import interrupts_held
from minisgl.llm.llm import MOST_PROMPTS_AT_ONCE

LONG = SamplingParams(ignore_eos=True, max_tokens=400)
SHORT = SamplingParams(ignore_eos=True, max_tokens=8)


def submit_that(llm, monkeypatch, when: int, act) -> None:
    """Let `act` be called within the engine at its `when`-th step from now."""
    engine, real = llm.scheduler.engine, llm.scheduler.engine.submit
    left = iter(range(when))

    def submit(batch):
        if next(left, None) is None:
            monkeypatch.setattr(engine, "submit", real)
            act()
        return real(batch)

    monkeypatch.setattr(engine, "submit", submit)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise MemoryError("no memory for the step")


def interrupt_twice() -> None:
    interrupt()
    interrupt()


@pytest.fixture(params=[False, True], ids=["not planned ahead", "planned ahead"])
def own(request, make_llm):
    return make_llm(overlap=request.param)


def check_usable(llm, expected: list[int]) -> None:
    assert llm.scheduler.is_idle
    llm.scheduler.check_integrity()
    assert llm.generate([1, 2, 3], SHORT)[0].token_ids == expected
    llm.scheduler.reset_prefix_cache()
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("when", [0, 5])
@pytest.mark.parametrize(
    ("act", "error"), [(interrupt, KeyboardInterrupt), (interrupt_twice, KeyboardInterrupt), (fail, MemoryError)], ids=lambda a: a.__name__
)
def test_generate_that_breaks_off_leaves_the_object_usable(act, error, when, own, monkeypatch):
    expected = own.generate([1, 2, 3], SHORT)[0].token_ids
    submit_that(own, monkeypatch, when, act)
    with pytest.raises(error):
        own.generate([[5] * 40, [6] * 3, [7] * 20], LONG)
    check_usable(own, expected)


def test_ctrl_c_keeps_a_stream_that_runs_beside_and_the_prefix_cache(own, monkeypatch):
    expected = own.generate([1, 2, 3], SHORT)[0].token_ids
    own.generate([8] * 40, SHORT)
    stream = own.stream([1, 2, 3], SHORT)
    tokens = next(stream).token_ids
    submit_that(own, monkeypatch, 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        own.generate([[5] * 40], LONG)
    assert tokens + [token for chunk in stream for token in chunk.token_ids] == expected
    assert own.generate([8] * 40, SHORT)[0].num_cached_tokens == 32
    check_usable(own, expected)


def test_a_step_that_fails_ends_a_stream_that_runs_beside_with_the_reason(own, monkeypatch):
    stream = own.stream([1, 2, 3], LONG)
    next(stream)
    submit_that(own, monkeypatch, 2, fail)
    with pytest.raises(MemoryError):
        own.generate([[5] * 40], LONG)
    result = list(stream)[-1].result
    assert result.finish_reason == "error"
    assert "no memory for the step" in result.error


def test_ctrl_c_while_prompts_are_tokenized_leaves_nothing_behind(llm, monkeypatch):
    expected = llm.generate([1, 2, 3], SHORT)[0].token_ids
    real, left = llm.tokenizer.encode_batch, iter(range(2))

    def encode_batch(texts, add_special_tokens):
        if next(left, None) is None:
            assert not llm.scheduler.is_idle  # those before have begun
            interrupt()
        return real(texts, add_special_tokens)

    monkeypatch.setattr(llm.tokenizer, "encode_batch", encode_batch)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["some text"] * (3 * MOST_PROMPTS_AT_ONCE), LONG)
    check_usable(llm, expected)


def test_ctrl_c_ends_an_iteration_over_a_stream(own, monkeypatch):
    expected = own.generate([1, 2, 3], SHORT)[0].token_ids
    submit_that(own, monkeypatch, 4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(own.stream([5] * 9, LONG))
    check_usable(own, expected)


# ---- holding the signal back ----------------------------------------------------------------------------------------------------------


def in_a_block(*acts) -> None:
    with interrupts_held():
        for act in acts:
            act()


def test_the_signal_is_handed_over_at_the_end_of_the_block():
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        in_a_block(interrupt, lambda: steps.append("went on"))
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_signal_is_handed_over_at_once():
    with pytest.raises(KeyboardInterrupt):
        in_a_block(interrupt, interrupt, lambda: pytest.fail("went on"))


def test_a_signal_is_not_lost_where_the_block_fails():
    with pytest.raises(KeyboardInterrupt):
        in_a_block(interrupt, fail)


def test_blocks_within_each_other_hand_it_on():
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        in_a_block(lambda: in_a_block(interrupt, lambda: steps.append("inner")), lambda: steps.append("outer"))
    assert steps == ["inner", "outer"]


def test_a_handler_of_the_users_own_is_the_one_that_hears():
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with interrupts_held():
            interrupt()
            assert heard == []
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_may_generate(llm):
    results = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate([1, 2, 3], SHORT)))
    thread.start()
    thread.join(60)
    assert [len(result.token_ids) for result in results] == [8]
