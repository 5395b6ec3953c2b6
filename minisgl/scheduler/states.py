"""Every move of a request between states. Nothing else in minisgl assigns `Req.state`.

    WAITING ──admit──► PREFILLING ──last chunk launched──► RUNNING
       ▲                   │                                  │
       └───────retract─────┴──────────────────────────────────┘
    any of them ──finish(stop | length | abort | error)──► FINISHED

Called by the scheduler and its parts. A wrong move raises IntegrityError: it is our own bug.
"""

from __future__ import annotations

from minisgl.core import FinishReason, Req, RequestState
from minisgl.errors import IntegrityError

__all__ = ["admit", "finish", "retract", "start_running"]


def admit(req: Req) -> None:
    """It holds a slot and its prompt is being computed."""
    _move(req, (RequestState.WAITING,), RequestState.PREFILLING)


def start_running(req: Req) -> None:
    """The step that samples its next token has been launched."""
    _move(req, (RequestState.PREFILLING,), RequestState.RUNNING)


def retract(req: Req) -> None:
    """It gave its pages back and waits to be computed again from its tokens."""
    _move(req, (RequestState.PREFILLING, RequestState.RUNNING), RequestState.WAITING)


def finish(req: Req, reason: FinishReason) -> None:
    """It has ended; what it holds is released once no launched step touches it."""
    _move(req, (RequestState.WAITING, RequestState.PREFILLING, RequestState.RUNNING), RequestState.FINISHED)
    req.finish_reason = reason


def _move(req: Req, allowed: tuple[RequestState, ...], target: RequestState) -> None:
    if req.state not in allowed:
        raise IntegrityError(f"request {req.uid} cannot go from {req.state.value} to {target.value}")
    req.state = target
