"""One process of the load client: sends its part of the plan, notes what comes back, reports when all is done.

Standard input brings the plan, then the moment of the start, then perhaps an order to stop; its end means that the parent has gone, and
then this process goes too. Standard output takes one byte when it is ready, and the result. SIGINT is the parent's business, which runs
this in a session of its own. Started as `python -m minisgl.bench.serve_client` by `serve_processes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import struct
import sys
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.bench.serve_http import Client
from minisgl.bench.serve_outcome import Outcome, answer_text, judge
from minisgl.bench.serve_plan import Conversation, Lane, Plan

__all__ = ["FRAME", "READY", "START", "Result", "main"]

FRAME = struct.Struct("<Q")
"""Length of the plan that follows."""
START = struct.Struct("<d")
"""A reading of `time.monotonic()`, which is the same in all processes."""
READY = b"r"
STDIN = 0
TICK_S = 0.02


@dataclass(frozen=True)
class Result:
    """What one process has seen."""

    outcomes: list[Outcome]
    num_interrupted: int
    """requests that were under way when the order to stop came"""
    num_not_sent: int
    """turns after one that failed, and what the order to stop left over"""
    seconds: float
    cpu_seconds: float
    lateness: bytes
    """float32, seconds by which this process woke up too late, every 20 ms: how far its times can be off"""


@dataclass
class _Load:
    """A plan that is being carried out."""

    plan: Plan
    origin: float
    openings: dict[int, bytes]
    """the first request of each conversation, by its number, ready to be sent"""
    outcomes: list[Outcome] = field(default_factory=list)
    num_begun: int = 0

    async def run(self, stop: asyncio.Event) -> Result:
        lateness: array[float] = array("f")
        cpu = time.process_time()
        lanes = asyncio.gather(*map(self._run_lane, self.plan.lanes))
        order, watch = asyncio.create_task(stop.wait()), asyncio.create_task(_watch_lateness(lateness))
        ends: list[asyncio.Future[Any]] = [lanes, order]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        seconds, cpu = time.monotonic() - self.origin, time.process_time() - cpu
        for task in (lanes, order, watch):
            task.cancel()
        for task in (order, watch, lanes):  # what else a lane may have met is a bug, and shows here
            with contextlib.suppress(asyncio.CancelledError):
                await task
        num_turns = sum(len(conversation.turns) for lane in self.plan.lanes for conversation in lane.conversations)
        num_interrupted = self.num_begun - len(self.outcomes)
        return Result(self.outcomes, num_interrupted, num_turns - self.num_begun, seconds, cpu, lateness.tobytes())

    async def _run_lane(self, lane: Lane) -> None:
        await asyncio.sleep(self.origin + lane.start - time.monotonic())
        with Client(self.plan.target, self.plan.timeout) as client:
            for conversation in lane.conversations:
                await self._talk(client, lane, conversation)

    async def _talk(self, client: Client, lane: Lane, conversation: Conversation) -> None:
        """Until its end, or the first request that fails."""
        texts: list[str] = []
        for place, turn in enumerate(conversation.turns):
            request, is_last = self.openings.pop(conversation.number, b""), place == len(conversation.turns) - 1
            if len(conversation.turns) > 1:
                texts.append(self.plan.text(conversation, place))
            if place:
                request = self.plan.form.request(self.plan.target, texts, turn.max_tokens)
            self.num_begun += 1
            reader = await client.ask(request, keeps_all=not is_last)
            self.outcomes.append(judge(reader, lane.number, self.origin))
            if self.outcomes[-1].problem:
                return
            if not is_last:
                texts.append(answer_text(reader))


async def _watch_lateness(lateness: array[float]) -> None:
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        lateness.append(time.monotonic() - due)


def _openings(plan: Plan) -> dict[int, bytes]:
    """Made before the clock runs."""
    return {
        each.number: plan.form.request(plan.target, [plan.text(each, 0)], each.turns[0].max_tokens)
        for lane in plan.lanes
        for each in lane.conversations
    }


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: an event costs half as much."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _run(plan: Plan, openings: dict[int, bytes], origin: float) -> Result:
    stop = asyncio.Event()

    def hear() -> None:
        if not os.read(STDIN, 1):  # the parent has gone
            os._exit(1)
        stop.set()

    asyncio.get_running_loop().add_reader(STDIN, hear)
    return await _Load(plan, origin, openings).run(stop)


def main() -> int:
    """The process's program; its exit status."""
    with open(STDIN, "rb", buffering=0, closefd=False) as stdin, open(sys.stdout.fileno(), "wb", closefd=False) as stdout:
        plan = msgspec.msgpack.decode(_read(stdin.fileno(), FRAME.unpack(_read(stdin.fileno(), FRAME.size))[0]), type=Plan)
        openings = _openings(plan)
        gc.collect()
        gc.freeze()  # no pause for what stays
        stdout.write(READY)
        stdout.flush()
        (origin,) = START.unpack(_read(stdin.fileno(), START.size))
        with contextlib.closing(_new_loop()) as loop:
            result = loop.run_until_complete(_run(plan, openings, origin))
        stdout.write(msgspec.msgpack.encode(result))
    return 0


def _read(fd: int, num_bytes: int) -> bytes:
    """Exactly so many. Without a parent there is nothing left to do."""
    data = b""
    while len(data) < num_bytes:
        piece = os.read(fd, num_bytes - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data


if __name__ == "__main__":
    sys.exit(main())
