"""Queues between processes of one machine: push/pull for one receiver, publish/subscribe for all ranks.

Knows ZeroMQ and nothing of what is sent: an encoder turns a message into bytes and a decoder turns it back. Every process of a server
uses these; no other module imports zmq. A queue belongs to the thread that uses it. No queue drops a message on a full buffer (the
high-water marks are 0), so whoever produces without end bounds itself.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import zmq
import zmq.asyncio

from minisgl.errors import ClosedError, ConfigError, WorkerError
from minisgl.utils.run_dir import claim_socket_path, ipc_path

__all__ = ["ZmqAsyncPullQueue", "ZmqPubQueue", "ZmqPullQueue", "ZmqPushQueue", "ZmqSubQueue", "decode_or_drop", "wait_any"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Q = TypeVar("Q", bound="_Queue")

LINGER_MS = 1000
"""How long a closed queue goes on delivering what it still holds. ZeroMQ's default would block the exit for ever."""


def _process_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The one context of this process. What its queues still hold when the process ends has LINGER_MS to go out."""
    atexit.unregister(_close_process_context)
    atexit.register(_close_process_context)
    return zmq.Context.instance()


def _close_process_context() -> None:
    zmq.Context.instance().destroy(linger=LINGER_MS)


def _remove_socket_file(path: Path | None, owner: int) -> None:
    if path is not None and os.getpid() == owner:  # a forked child inherits the object, not the socket
        path.unlink(missing_ok=True)


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, math.ceil(seconds * 1000))


def decode_or_drop(decoder: Callable[[bytes], T], frame: bytes) -> T | None:
    """The message in `frame`; None, and a line in the log, if it holds none. The content of a bad frame never reaches the log."""
    try:
        return decoder(frame)
    except Exception as error:  # the boundary to other processes: whatever a frame holds, its receiver lives on
        logger.warning("dropped a frame of %d bytes that does not decode (%s)", len(frame), type(error).__name__)
        return None


class _Queue:
    """One socket, its address and its end. `create=True` binds the address, `create=False` connects to it, before or after that."""

    def __init__(
        self, kind: int, addr: str, create: bool, *, options: Sequence[tuple[int, int | bytes]] = (), asynchronous: bool = False
    ) -> None:
        self.addr = addr
        path = ipc_path(addr)
        if create:
            claim_socket_path(path)
        socket_class: Any = zmq.asyncio.Socket if asynchronous else zmq.Socket
        self._socket: Any = _process_context().socket(kind, socket_class=socket_class)
        # Set later, marks and subscriptions would miss the connections that exist by then.
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, LINGER_MS), *options):
            self._socket.setsockopt(option, value)
        try:
            (self._socket.bind if create else self._socket.connect)(addr)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise ConfigError(f"cannot {'bind' if create else 'connect to'} {addr}: {error}") from error
        # ZeroMQ leaves the file behind. This also runs when the process ends without `stop()`.
        self._remove_file = weakref.finalize(self, _remove_socket_file, path if create else None, os.getpid())

    def __enter__(self: Q) -> Q:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def socket(self) -> Any:
        """The zmq socket. Raises ClosedError after `stop()`."""
        if self._socket.closed:
            raise ClosedError(f"the queue at {self.addr} was used after stop()")
        return self._socket

    def stop(self) -> None:
        """Close the socket and remove its file; what was put is still delivered for LINGER_MS. A second call does nothing."""
        self._remove_file()
        self._socket.close()


class _Sender(_Queue, Generic[T]):
    """The sending end of both kinds."""

    _encoder: Callable[[T], bytes]

    def put(self, message: T) -> None:
        """Send one message."""
        self.put_raw(self._encoder(message))

    def put_raw(self, frame: bytes) -> None:
        """Send bytes that are encoded already. A push queue that was created and has had no receiver yet blocks until one connects."""
        self.socket.send(frame)


class _Receiver(_Queue, Generic[T]):
    """The receiving end of both kinds."""

    _decoder: Callable[[bytes], T]

    def get(self, timeout: float | None = None) -> T:
        """The next message that decodes; a frame that does not is logged by its length and dropped.

        Waits `timeout` seconds, None: for ever. Raises TimeoutError if none has come.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            message = decode_or_drop(self._decoder, self.get_raw(left))
            if message is not None:
                return message

    def get_raw(self, timeout: float | None = None) -> bytes:
        """The next frame as it came. Waits and raises as `get` does."""
        if timeout is not None and not self.socket.poll(_milliseconds(timeout)):
            raise TimeoutError(f"nothing arrived at {self.addr}")
        return bytes(self.socket.recv())

    def decode(self, frame: bytes) -> T:
        """The message in `frame`. Raises what the decoder raises."""
        return self._decoder(frame)

    def empty(self) -> bool:
        """True if nothing has arrived yet that was not taken."""
        return not self.socket.poll(0)


class HasFileno(Protocol):
    """A file to wait for."""

    def fileno(self) -> int: ...


class ZmqPushQueue(_Sender[T]):
    """Sends each message to one receiver."""

    def __init__(self, addr: str, create: bool, encoder: Callable[[T], bytes]) -> None:
        super().__init__(zmq.PUSH, addr, create)
        self._encoder = encoder


class ZmqPullQueue(_Receiver[T]):
    """Receives from any number of push queues."""

    def __init__(self, addr: str, create: bool, decoder: Callable[[bytes], T]) -> None:
        super().__init__(zmq.PULL, addr, create)
        self._decoder = decoder


class ZmqPubQueue(_Sender[T]):
    """Sends each message to all subscribers of that moment; see `wait_for_subscribers`."""

    def __init__(self, addr: str, create: bool, encoder: Callable[[T], bytes]) -> None:
        # Equal subscriptions would be reported once, however many there are.
        super().__init__(zmq.XPUB, addr, create, options=[(zmq.XPUB_VERBOSE, 1)])
        self._encoder = encoder
        self._num_subscribers = 0

    def wait_for_subscribers(self, n: int, timeout: float | None = None) -> None:
        """Return when `n` subscriptions have arrived since the start. Counts them, cannot tell whose they are.

        Waits `timeout` seconds, None: for ever. Raises WorkerError with both numbers when that is over.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._num_subscribers < n:
            left = None if deadline is None else deadline - time.monotonic()
            if not self.socket.poll(_milliseconds(left)):
                raise WorkerError(f"{self._num_subscribers} of {n} subscribers came to {self.addr} within {timeout:g} s")
            self._num_subscribers += self.socket.recv() == b"\x01"


class ZmqSubQueue(_Receiver[T]):
    """Receives everything that a publish queue sends from the moment its subscription has arrived there."""

    def __init__(self, addr: str, create: bool, decoder: Callable[[bytes], T]) -> None:
        super().__init__(zmq.SUB, addr, create, options=[(zmq.SUBSCRIBE, b"")])
        self._decoder = decoder


class ZmqAsyncPullQueue(_Queue, Generic[T]):
    """A pull queue for an event loop. Construct it where the loop runs."""

    def __init__(self, addr: str, create: bool, decoder: Callable[[bytes], T]) -> None:
        super().__init__(zmq.PULL, addr, create, asynchronous=True)
        self._decoder = decoder
        self._waiting: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)

    async def get(self) -> T:
        """The next message that decodes; others are dropped as in `ZmqPullQueue.get`. May be cancelled without losing a message."""
        while True:
            message = decode_or_drop(self._decoder, bytes(await self.socket.recv()))
            if message is not None:
                return message

    def get_waiting(self) -> T | None:
        """The next message that has arrived already and decodes; None if there is none. For the loop's thread, before `stop()`."""
        while True:
            try:
                frame = self._waiting.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = decode_or_drop(self._decoder, bytes(frame))
            if message is not None:
                return message


def wait_any(queues: Sequence[_Receiver[Any] | HasFileno], timeout: float | None = None) -> list[int]:
    """Indices of the queues that hold something, ascending. Waits `timeout` seconds (None: for ever) for one; none when they are over.

    Files beside queues count when there is something to read, or nothing more will come.
    """
    sources = [queue.socket if isinstance(queue, _Receiver) else queue.fileno() for queue in queues]
    poller = zmq.Poller()
    for source in sources:
        poller.register(source, zmq.POLLIN)
    ready = dict(poller.poll(_milliseconds(timeout)))
    return [index for index, source in enumerate(sources) if source in ready]
