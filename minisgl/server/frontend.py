"""The API's end of the queues: a uid and a mailbox for each request, and the abort that leaving one sends (hops 2 and 12).

Knows messages and nothing of HTTP or JSON. Called by the routes; all of it belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from minisgl.core import SamplingParams
from minisgl.errors import RequestError
from minisgl.message import AbortMsg, BaseFrontendMsg, BaseTokenizerMsg, BatchFrontendMsg, TokenizeMsg, UserReply
from minisgl.utils import ZmqAsyncPullQueue, ZmqPushQueue

__all__ = ["ClientGoneError", "Frontend", "Piece", "Ticket"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's receive: after the body, it returns when the client has disconnected."""


class ClientGoneError(Exception):
    """The client has disconnected: nobody reads an answer, nothing went wrong."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the last piece, merged: a slow reader gets fewer and longer ones."""

    text: str
    final: UserReply | None
    """the ending, in the last piece only"""


class Ticket:
    """One accepted or pending request, as its handler sees it. Made by `Frontend.open`."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.is_over = False
        """The workers hold nothing of it any more: it was rejected, has ended, or they are gone."""
        self._num_prompt_tokens: int | None = None
        self._text = ""
        self._final: UserReply | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    async def accepted(self) -> int:
        """Wait for the verdict; the number of prompt tokens. Raises RequestError if rejected, ClientGoneError if nobody waits."""
        while self._num_prompt_tokens is None:
            await self._next_change()
        return self._num_prompt_tokens

    async def next_piece(self) -> Piece:
        """Wait for text or the ending. Raises RequestError, after the text that came before it, if the request broke off."""
        while not self._text and self._final is None:
            await self._next_change()
        text, self._text = self._text, ""
        return Piece(text, self._final)

    async def _next_change(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    def take(self, reply: UserReply) -> None:
        """A reply has arrived."""
        self._text += reply.text
        if reply.kind == "accepted":
            self._num_prompt_tokens = reply.num_prompt_tokens
        elif reply.kind in ("rejected", "final"):
            self.is_over = True
            if reply.status:
                self._error = RequestError(reply.message, status=reply.status, code=reply.code, param=reply.param)
            else:
                self._final = reply
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will be read or come, because of `error`."""
        self._error = self._error or error
        self._changed.set()


class Frontend:
    """All requests of this API process. Starts closed: requests are refused until `open_doors`."""

    def __init__(self, frontend_addr: str, tokenizer_addr: str) -> None:
        self._frontend_addr = frontend_addr
        self._tokenizer_addr = tokenizer_addr
        self._tickets: dict[int, Ticket] = {}
        self._uids = itertools.count()
        self._refusal: RequestError | None = RequestError("the model is still being loaded; try again later", status=503, code="starting")
        self._to_tokenizer: ZmqPushQueue[BaseTokenizerMsg] | None = None

    @property
    def refusal(self) -> RequestError | None:
        """Why no request is taken now; None if they are."""
        return self._refusal

    @property
    def num_open(self) -> int:
        """Requests whose handlers have not left."""
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

    def close_doors(self, error: RequestError) -> None:
        """Refuse what comes from now on and end what is pending, with `error`."""
        self._refusal = error
        for ticket in self._tickets.values():
            ticket.is_over = True
            ticket.fail(error)

    @contextlib.asynccontextmanager
    async def open(self, receive: Receive, params: SamplingParams, messages: list[dict[str, Any]]) -> AsyncIterator[Ticket]:
        """A chat request: leaving the block before its end aborts it. Inside, a client that disconnects is a ClientGoneError.

        `receive` is ASGI's, with the body read. Raises RequestError if no request is taken now or the messages cannot be sent on.
        """
        if self._refusal is not None:
            raise self._refusal
        ticket = Ticket(next(self._uids))
        self._put(TokenizeMsg(ticket.uid, params, messages=messages))
        self._tickets[ticket.uid] = ticket
        watch = asyncio.create_task(_watch_client(receive, ticket))
        try:
            yield ticket
        finally:  # without an await: the task that runs this may have been cancelled already
            watch.cancel()
            del self._tickets[ticket.uid]
            if not ticket.is_over:
                self._put(AbortMsg(ticket.uid))

    def _put(self, message: BaseTokenizerMsg) -> None:
        """Send without waiting: the queue has no limit and connects by itself."""
        if self._to_tokenizer is None:
            raise RuntimeError("Frontend.open is used inside Frontend.running only")
        try:
            frame = BaseTokenizerMsg.encoder(message)
        except (OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise RequestError(f"messages: a value that cannot be sent on ({error})", param="messages") from error
        self._to_tokenizer.put_raw(frame)

    async def _deliver(self, inbox: ZmqAsyncPullQueue[BaseFrontendMsg]) -> None:
        while True:
            message = await inbox.get()
            for reply in message.data if isinstance(message, BatchFrontendMsg) else (message,):
                # Replies to a request whose handler has left are on their way until the abort arrives.
                if isinstance(reply, UserReply) and reply.uid in self._tickets:
                    self._tickets[reply.uid].take(reply)


async def _watch_client(receive: Receive, ticket: Ticket) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.fail(ClientGoneError())
