"""A rank of `LLM(tp_size=2)` that a signal has stopped is not waited for without end: it is named, and no process is left."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import ClosedError, WorkerError
from minisgl.llm import LLM, ranks
from minisgl.processes import children
from tests.llm.conftest import SMALL
from tests.llm.test_llm_tp import LONG, SHORT, START_S, Ranks, rank_pids
from tests.server.server_process import END_S, is_running, wait_until

pytestmark = [pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs waitid"), pytest.mark.timeout(120)]

LOOK_S = 0.02


def says_who_is_stopped(made, rank, doing):
    name = f"the scheduler{' rank 1' if rank else ''} process"
    return rf"{name} \(pid {made.pids[rank]}\) was stopped by a signal and did not go on for 6 s, {doing}"


def check_lost_in_decode(made, rank, limit):
    stream = made.llm.stream([1, 2, 3], LONG)
    next(stream)
    begin = time.monotonic()
    os.kill(made.pids[rank], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=says_who_is_stopped(made, rank, r"in its step [1-9]\d*")):
        made.llm.generate([[5] * 40, [6] * 3], LONG)
    assert made.has_gone()
    assert time.monotonic() - begin < limit
    *_, last = stream  # tokens that came before, and the end
    assert "was stopped by a signal" in last.result.error
    with pytest.raises(ClosedError, match="was stopped by a signal"):
        made.llm.generate("a")


@pytest.fixture
def made(tiny_models):
    made = Ranks(tiny_models("llama"))
    yield made
    made.llm.close()
    assert made.has_gone()


def test_a_stopped_rank_is_told_after_some_looks(made, monkeypatch):
    for module in (children, ranks):
        monkeypatch.setattr(module, "LOOK_S", LOOK_S)
    check_lost_in_decode(made, 1, END_S)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_in_decode_is_named_within_ten_seconds(made, rank):
    check_lost_in_decode(made, rank, END_S)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_stopped_while_idle_is_named_by_the_next_call(made, rank):
    made.llm.generate([1, 2, 3], SHORT)
    os.kill(made.pids[rank], signal.SIGSTOP)
    begin = time.monotonic()
    doing = "(while it waited for a message|in its step)"  # its last step may not have ended when the caller has the tokens
    with pytest.raises(WorkerError, match=says_who_is_stopped(made, rank, doing)):
        made.llm.generate([1, 2, 3], SHORT)
    assert made.has_gone()
    assert time.monotonic() - begin < END_S


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_at_start_is_named(rank, tiny_models):
    stopped = []

    def stop():
        assert wait_until(lambda: len(rank_pids(os.getpid())) == 2, START_S)
        stopped.extend(sorted(rank_pids(os.getpid())))
        os.kill(stopped[rank], signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    begin = time.monotonic()
    try:
        with pytest.raises(WorkerError, match=r"was stopped by a signal .* while the ranks were starting") as caught:
            LLM(tiny_models("llama"), tp_size=2, **SMALL)
    finally:
        thread.join(START_S)
    assert time.monotonic() - begin < END_S
    assert f"(pid {stopped[rank]})" in str(caught.value)
    assert not any(map(is_running, stopped))


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_three_seconds_changes_no_token(made):
    params = SamplingParams(ignore_eos=True, max_tokens=200)
    expected = made.llm.generate([1, 2, 3], params)[0].token_ids
    stream = made.llm.stream([1, 2, 3], params)
    found = next(stream).token_ids
    os.kill(made.pids[1], signal.SIGSTOP)
    going_on = threading.Timer(3, os.kill, (made.pids[1], signal.SIGCONT))
    going_on.start()
    begin = time.monotonic()
    found += [token for chunk in stream for token in chunk.token_ids]
    going_on.join()
    assert time.monotonic() - begin > 2.5
    assert found == expected
