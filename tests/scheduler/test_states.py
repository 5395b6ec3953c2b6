"""Every move of a request between states: the allowed ones work, all others are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.core import Req, RequestState, SamplingParams
from minisgl.errors import IntegrityError
from minisgl.scheduler import states

WAITING, PREFILLING, RUNNING, FINISHED = RequestState.WAITING, RequestState.PREFILLING, RequestState.RUNNING, RequestState.FINISHED

MOVES: dict[Callable[[Req], None], dict[RequestState, RequestState]] = {
    states.admit: {WAITING: PREFILLING},
    states.start_running: {PREFILLING: RUNNING},
    states.retract: {PREFILLING: WAITING, RUNNING: WAITING},
    lambda req: states.finish(req, "stop"): {WAITING: FINISHED, PREFILLING: FINISHED, RUNNING: FINISHED},
}


def request_in(state: RequestState) -> Req:
    req = Req.from_prompt(0, np.array([1, 2], dtype=np.int32), SamplingParams(), 4, frozenset())
    steps = {WAITING: [], PREFILLING: [states.admit], RUNNING: [states.admit, states.start_running]}
    for step in steps.get(state, []):
        step(req)
    if state is FINISHED:
        states.finish(req, "length")
    assert req.state is state
    return req


@pytest.mark.parametrize("start", RequestState)
@pytest.mark.parametrize("move", MOVES)
def test_a_move_leads_where_the_diagram_says_or_is_refused(move: Callable[[Req], None], start: RequestState) -> None:
    req = request_in(start)
    if start in MOVES[move]:
        move(req)
        assert req.state is MOVES[move][start]
        return
    with pytest.raises(IntegrityError, match=start.value):
        move(req)
    assert req.state is start


def test_the_first_ending_counts() -> None:
    req = request_in(FINISHED)
    with pytest.raises(IntegrityError):
        states.finish(req, "abort")
    assert req.finish_reason == "length"
