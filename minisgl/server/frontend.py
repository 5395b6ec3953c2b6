"""The API's end of the queues: uids and mailboxes for each request, and the abort that leaving one sends (hops 2 and 12).

One HTTP request is a `Group` of tickets, one for each choice of each prompt. Knows messages and nothing of HTTP or JSON. Called by the
routes; all of it belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import msgspec

from minisgl.errors import RequestError
from minisgl.message import (
    AbortMsg,
    BaseFrontendMsg,
    BaseTokenizerMsg,
    BatchFrontendMsg,
    BatchTokenizerMsg,
    DecodeMsg,
    FlushCacheMsg,
    StatsReply,
    TokenizeMsg,
    TokenScore,
    UserReply,
)
from minisgl.server.http_options import HttpOptions
from minisgl.server.request_counts import Course, RequestCounts
from minisgl.utils import ZmqAsyncPullQueue, ZmqPushQueue

__all__ = ["ClientGoneError", "Frontend", "Group", "Job", "Piece", "Receive"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's receive: after the body, it returns when the client has disconnected."""
TURN_S = 0.005
"""Replies that have arrived are taken for so long before others get their turn; what they show on one connection is sent at once."""
SCORE_BYTES = 64
"""About as much is written for one token's log probability."""
Job = Union[TokenizeMsg, DecodeMsg, FlushCacheMsg]
"""What the workers can be asked; its uid is filled in here."""


class ClientGoneError(Exception):
    """The client has disconnected: nobody reads an answer, nothing went wrong."""


@dataclass(slots=True)
class Piece:
    """What came for one ticket since its last piece, merged: a slow reader gets fewer and longer ones."""

    index: int
    """the ticket's place: choice `index % n` of prompt `index // n`"""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    final: UserReply | None = None
    """the ending, in the last piece only"""
    num_bytes: int = 0
    """about how much of it could not be written at once"""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, reply: UserReply) -> bool:
        """Add a reply; whether there is something to show now."""
        if reply.text:
            self.texts.append(reply.text)
        self.token_ids += reply.token_ids
        self.scores += reply.scores
        self.prompt_scores += reply.prompt_scores
        if reply.kind == "final":
            self.final = reply
        return bool(self.texts or self.scores or self.token_ids or self.prompt_scores or self.final)

    def add(self, later: Piece) -> None:
        """Append the piece that came after this one."""
        self.texts += later.texts
        self.token_ids += later.token_ids
        self.scores += later.scores
        self.prompt_scores += later.prompt_scores
        self.final = later.final


@dataclass(slots=True, eq=False)
class _Ticket:
    """One uid."""

    uid: int
    group: Group
    piece: Piece
    course: Course = field(default_factory=Course)
    is_accepted: bool = False
    is_aborting: bool = False
    """An ending has been asked for by `Frontend.abort`."""
    is_over: bool = False
    """The workers hold nothing of it any more: it was rejected, has ended, or they are gone."""


class Group:
    """One HTTP request, accepted or pending, as its handler sees it. Made by `Frontend.open`."""

    def __init__(self, uids: Sequence[int]) -> None:
        self.tickets = [_Ticket(uid, self, Piece(index)) for index, uid in enumerate(uids)]
        self._ready: dict[int, None] = {}
        """tickets with something to show, in the order in which it came"""
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self.write_now: Callable[[Piece], bool] | None = None
        """Shows a piece, sent off by `flush`, and tells whether it could; for what comes while the handler waits. Endings go to it."""
        self.flush: Callable[[], None] = lambda: None
        """Sends off what `write_now` has shown; called when all that has arrived has been taken."""
        self.on_backlog: Callable[[int], None] = lambda _: None
        """Called with the bytes that wait for the handler when more of them have come."""
        self._num_waiting_bytes = 0
        self._is_awaited = False
        """the handler waits in `next_piece`, so that everything before has been shown"""

    async def accepted(self) -> None:
        """Wait for all verdicts. Raises RequestError if one is a rejection, ClientGoneError if nobody waits."""
        while not all(ticket.is_accepted for ticket in self.tickets):
            await self._next_change()

    async def next_piece(self) -> Piece:
        """Wait for something to show. Raises RequestError, after what came before it, if one of the tickets broke off."""
        self._is_awaited = True
        try:
            while not self._ready:
                await self._next_change()
        finally:
            self._is_awaited = False
        if isinstance(self._error, ClientGoneError):
            raise self._error
        index = next(iter(self._ready))
        del self._ready[index]
        ticket = self.tickets[index]
        piece, ticket.piece = ticket.piece, Piece(index)
        self._num_waiting_bytes -= piece.num_bytes
        return piece

    async def _next_change(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    def take(self, ticket: _Ticket, reply: UserReply) -> None:
        """A reply has arrived."""
        ticket.is_accepted |= reply.kind == "accepted"
        ticket.is_over |= reply.kind in ("rejected", "final")
        if ticket.is_over and reply.status:
            self.fail(RequestError(reply.message, status=reply.status, code=reply.code, param=reply.param))
            reply.kind = "delta"  # what it still brings comes before the error, and is no ending
        has_more = ticket.piece.take(reply)
        may_write = self._is_awaited and not self._ready and self._error is None and ticket.piece.final is None
        if has_more and may_write and self.write_now is not None and self.write_now(ticket.piece):
            ticket.piece = Piece(ticket.piece.index)
            return
        if has_more:
            self._ready[ticket.piece.index] = None
            num_bytes = _num_bytes(reply)
            ticket.piece.num_bytes += num_bytes
            self._num_waiting_bytes += num_bytes
            self.on_backlog(self._num_waiting_bytes)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will be read or come, because of `error`."""
        self._error = self._error or error
        self._changed.set()


class Frontend:
    """All requests of this API process. Starts closed: requests are refused until `open_doors`."""

    def __init__(self, frontend_addr: str, tokenizer_addr: str, options: HttpOptions | None = None) -> None:
        self._options = options or HttpOptions()
        self._frontend_addr = frontend_addr
        self._tokenizer_addr = tokenizer_addr
        self._tickets: dict[int, _Ticket] = {}
        self._waiting: set[int] = set()
        """uids without a first token whose handlers have not left"""
        self._groups: dict[str, Group] = {}
        self._next_uid = 0
        self._refusal: RequestError | None = RequestError("the model is still being loaded; try again later", status=503, code="starting")
        self._is_draining = False
        self._to_tokenizer: ZmqPushQueue[BaseTokenizerMsg] | None = None
        self.counts = RequestCounts()

    @property
    def refusal(self) -> RequestError | None:
        """Why no request is taken now; None if they are."""
        return self._refusal

    @property
    def is_draining(self) -> bool:
        """No new request is taken, and those that run go on."""
        return self._is_draining

    @property
    def num_open(self) -> int:
        """Prompts times choices of requests whose handlers have not left."""
        return len(self._tickets)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sockets open and replies delivered inside; requests can be made only here."""
        with (
            ZmqAsyncPullQueue[BaseFrontendMsg](self._frontend_addr, create=True, decoder=BaseFrontendMsg.decoder) as inbox,
            ZmqPushQueue[BaseTokenizerMsg](self._tokenizer_addr, create=False, encoder=BaseTokenizerMsg.encoder) as self._to_tokenizer,
        ):
            deliver = asyncio.create_task(self._deliver(inbox))
            try:
                yield
            finally:
                deliver.cancel()
                await asyncio.gather(deliver, return_exceptions=True)

    def open_doors(self) -> None:
        """All processes are ready."""
        self._refusal = None

    def drain(self, error: RequestError) -> None:
        """Refuse what comes from now on, with `error`; what runs goes on."""
        self._refusal, self._is_draining = error, True

    def close_doors(self, error: RequestError) -> None:
        """Refuse what comes from now on and end what is pending, with `error`."""
        self._refusal, self._is_draining = error, False
        for ticket in self._tickets.values():
            ticket.is_over = True
            ticket.group.fail(error)

    @contextlib.asynccontextmanager
    async def open(self, receive: Receive, jobs: Sequence[Job], name: str = "") -> AsyncIterator[Group]:
        """One HTTP request: leaving the block aborts what has not ended. Inside, a client that disconnects is a ClientGoneError.

        `receive` is ASGI's, with the body read; by `name`, if it has one, the request can be aborted. Raises RequestError if no request
        is taken now, if too many wait, or if the jobs cannot be sent on.
        """
        if self._refusal is not None:
            raise self._refusal
        self._check_room(sum(map(_num_choices, jobs)))
        numbered = [msgspec.structs.replace(job, uid=self._take_uids(_num_choices(job))) for job in jobs]
        group = Group([job.uid + choice for job in numbered for choice in range(_num_choices(job))])
        self._put(numbered)
        self._tickets.update((ticket.uid, ticket) for ticket in group.tickets)
        self._waiting.update(ticket.uid for ticket in group.tickets)
        if name:
            self._groups[name] = group
        watch = asyncio.create_task(_watch_client(receive, group))
        deadline = asyncio.get_running_loop().call_later(self._options.request_timeout, self._expire, group)
        try:
            yield group
        finally:  # without an await: the task that runs this may have been cancelled already
            watch.cancel()
            deadline.cancel()
            self._groups.pop(name, None)
            for ticket in group.tickets:
                del self._tickets[ticket.uid]
                self._waiting.discard(ticket.uid)
                self.counts.note_left(ticket.course)
            self._abort_rest(group)

    def abort(self, name: str) -> int:
        """End the request of that name, whose reader gets an ending; the number of outputs that this ends, 0 for a name that is unknown."""
        group = self._groups.get(name)
        running = [ticket for ticket in group.tickets if not ticket.is_over and not ticket.is_aborting] if group is not None else []
        for ticket in running:
            ticket.is_aborting = True
        self._put([AbortMsg(ticket.uid, wants_ending=True) for ticket in running])
        return len(running)

    def _check_room(self, count: int) -> None:
        """Raise RequestError unless `count` more outputs may wait."""
        most = self._options.max_waiting_requests
        if count > most:
            raise RequestError(f"the request has {count} outputs (prompts times n); {most} are allowed", code="too_many_outputs")
        if len(self._waiting) + count > most:
            text = f"the queue is full: {len(self._waiting)} of {most} places are taken, {count} are wanted; try again later"
            raise RequestError(text, status=429, code="queue_full")

    def _expire(self, group: Group) -> None:
        """End it with an error. The workers are told now: its handler may be waiting for its client."""
        text = f"the request has not been answered within {self._options.request_timeout:g} seconds, which is what is allowed"
        group.fail(RequestError(text, status=504, code="request_timeout"))
        self._abort_rest(group)

    def _abort_rest(self, group: Group) -> None:
        """Have the workers drop what has not ended."""
        running = [ticket for ticket in group.tickets if not ticket.is_over]
        for ticket in running:
            ticket.is_over = True
        self._put([AbortMsg(ticket.uid) for ticket in running])

    def _take_uids(self, count: int) -> int:
        """The first of `count` new uids that follow each other."""
        first = self._next_uid
        self._next_uid += count
        return first

    def _put(self, messages: Sequence[Job] | Sequence[AbortMsg]) -> None:
        """Send without waiting: the queue has no limit and connects by itself. All travel in one frame, or none does."""
        if self._to_tokenizer is None:
            raise RuntimeError("a frontend is used inside Frontend.running only")
        if not messages:
            return
        try:
            frame = BaseTokenizerMsg.encoder(messages[0] if len(messages) == 1 else BatchTokenizerMsg(list(messages)))
        except (OverflowError, RecursionError, UnicodeEncodeError) as error:
            param = "messages" if getattr(messages[0], "messages", None) is not None else "prompt"
            raise RequestError(f"{param}: a value that cannot be sent on ({error})", param=param) from error
        self._to_tokenizer.put_raw(frame)

    async def _deliver(self, inbox: ZmqAsyncPullQueue[BaseFrontendMsg]) -> None:
        while True:
            message: BaseFrontendMsg | None = await inbox.get()
            deadline = time.monotonic() + TURN_S
            groups: set[Group] = set()
            while message is not None:
                now = time.monotonic()
                self._take(message, now, groups)
                message = inbox.get_waiting() if now < deadline else None
            for group in groups:
                group.flush()
            await asyncio.sleep(0)  # more replies may wait: others get their turn in between

    def _take(self, message: BaseFrontendMsg, now: float, groups: set[Group]) -> None:
        """Deliver what arrived at `now`; adds to `groups` those that it was for."""
        for reply in message.data if isinstance(message, BatchFrontendMsg) else (message,):
            # Replies to a request whose handler has left are on their way until the abort arrives.
            if isinstance(reply, UserReply) and reply.uid in self._tickets:
                if reply.kind != "accepted":
                    self._waiting.discard(reply.uid)
                ticket = self._tickets[reply.uid]
                self.counts.note(ticket.course, reply, now)
                ticket.group.take(ticket, reply)
                groups.add(ticket.group)
            elif isinstance(reply, StatsReply):
                self.counts.take_scheduler(reply.stats)


async def _watch_client(receive: Receive, group: Group) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    group.fail(ClientGoneError())


def _num_bytes(reply: UserReply) -> int:
    """About as much is written for it, without the frame of an event."""
    return len(reply.text) + 8 * len(reply.token_ids) + SCORE_BYTES * sum(1 + len(score.top) for score in reply.scores)


def _num_choices(job: Job) -> int:
    return job.sampling_params.n if isinstance(job, TokenizeMsg) else 1
