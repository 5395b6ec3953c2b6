"""The routes under /health. They look at shared memory and at flags of this process, so they answer while every worker is busy.

    /health             all processes live                       503 while starting, if a process is silent, or once the server breaks down
    /health/ready       and requests are taken                   503 also while the server drains
    /health/progress    all live, and no step takes too long     503 if a step is stuck

Knows no messages and no model. Called by the app.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.errors import RequestError
from minisgl.server.answers import Progress, Status
from minisgl.server.frontend import Frontend
from minisgl.utils.heartbeat import Pulse, PulseReader

__all__ = ["Health"]


class Health:
    """What is known of the server's processes."""

    def __init__(self, frontend: Frontend, reader: PulseReader | None = None, workers: Sequence[str] = ()) -> None:
        """`workers`: names of the processes whose signs of life `reader` reads, in its order."""
        self._frontend = frontend
        self._reader = reader
        self._workers = workers

    def routes(self) -> list[Route]:
        """For the application."""
        return [Route("/health", self.alive), Route("/health/ready", self.ready), Route("/health/progress", self.progress)]

    async def alive(self, _: Request) -> Response:
        """All processes live and the server has started."""
        self._check_alive()
        return _json(Status())

    async def ready(self, _: Request) -> Response:
        """The same, and requests are taken."""
        self._check_alive()
        if self._frontend.refusal is not None:
            raise self._frontend.refusal
        return _json(Status())

    async def progress(self, _: Request) -> Response:
        """The same as `alive`, and no step takes longer than it may."""
        pulses = self._check_alive()
        for name, pulse in zip(self._workers, pulses, strict=False):
            if pulse.is_stuck:
                text = (
                    f"a step of the {name} process runs for {pulse.step_s:.0f} s; {pulse.step_timeout_s:g} s are allowed (--step-timeout)"
                )
                raise RequestError(text, status=503, code="step_stuck")
        num_steps = min((pulse.num_steps for pulse in pulses if pulse.step_timeout_s), default=0)
        return _json(Progress(self._frontend.num_open, num_steps))

    def _check_alive(self) -> list[Pulse]:
        """Raise RequestError unless the server has started and every process beats."""
        if self._frontend.refusal is not None and not self._frontend.is_draining:
            raise self._frontend.refusal
        pulses = self._reader.read() if self._reader is not None else []
        for name, pulse in zip(self._workers, pulses, strict=False):
            if pulse.is_silent:
                text = f"the {name} process has given no sign of life for {pulse.silence_s:.0f} s"
                raise RequestError(text, status=503, code="worker_silent")
        return pulses


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
