"""How a scheduler hears and answers: four transports behind one mixin, so that every rank hears the same messages in the same order.

Knows queues, the process group and message types; knows no model, engine, cache or request state, and loads none of their code. The
scheduler inherits `SchedulerIOMixin` and supplies `run_when_idle`; offline, the subclass supplies both ends as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from minisgl.errors import ConfigError
from minisgl.message import BaseBackendMsg, BaseTokenizerMsg, BatchBackendMsg, BatchTokenizerMsg
from minisgl.scheduler.agreement import NO_DIGESTS
from minisgl.scheduler.config import SchedulerConfig
from minisgl.utils import ZmqPubQueue, ZmqPullQueue, ZmqPushQueue, ZmqSubQueue, decode_or_drop

__all__ = ["SchedulerIOMixin"]

START_TIMEOUT_S = 600.0
"""How long ranks wait for each other; loading a large model may come before that."""
LOOK_UP_S = 1.0
"""How long a rank other than 0 waits for a message before it looks whether rank 0 waits too."""


class SchedulerIOMixin:
    """The scheduler's ears and mouth. One transport is picked at construction, which also connects it.

    All ranks call `receive_msg` equally often and with the same `blocking`, which follows from state that is the same everywhere.
    """

    def __init__(
        self, config: SchedulerConfig, tp_cpu_group: dist.ProcessGroup | None, *, subscribe_timeout: float = START_TIMEOUT_S
    ) -> None:
        """Open this rank's sockets. On rank 0 of several, return when the others have subscribed.

        `tp_cpu_group` is a gloo group of all ranks, in rank order; one rank needs none. `subscribe_timeout` in seconds. Raises
        WorkerError if a rank does not subscribe in time, ConfigError if the group is not the one that `config.tp_info` describes
        or an address cannot be used.
        """
        with ExitStack() as opened:
            self._transport = _make_transport(config, tp_cpu_group, self, opened, subscribe_timeout)
            self._sockets = opened.pop_all()

    def receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        """All messages that have arrived, batches unpacked; the same list on every rank. If `blocking`, at least one.

        Before it waits it calls `run_when_idle`. A frame that does not decode is dropped, on every rank alike. Offline, the subclass
        decides what `blocking` means.
        """
        return self._transport.receive(blocking)

    def send_result(self, reply: BaseTokenizerMsg) -> None:
        """Send what a step brought to the detokenizer. Only rank 0 speaks; on the others this does nothing."""
        self._transport.send(reply)

    def sync_all_ranks(self, timeout: float = START_TIMEOUT_S) -> None:
        """Return when all ranks have called this. On rank 0, RuntimeError names those that did not within `timeout` seconds."""
        self._transport.sync(timedelta(seconds=timeout))

    def close(self) -> None:
        """Close the sockets; what was sent is still delivered. A second call does nothing."""
        self._sockets.close()

    def run_when_idle(self) -> None:
        """Called when there is nothing to do, before waiting for a message. The scheduler supplies it."""
        raise NotImplementedError("a scheduler supplies run_when_idle()")

    def step_digests(self) -> Sequence[int]:
        """Number of the last handled step and a digest per field of it. The scheduler supplies them; whatever only does IO has none."""
        return NO_DIGESTS

    def check_agreement(self, theirs: Sequence[int]) -> None:
        """Called on ranks other than 0, each time messages are received, with rank 0's `step_digests`. The scheduler compares."""

    def look_up(self) -> None:
        """Called about once a second on ranks other than 0 while they wait for a message. May raise: rank 0 does not wait."""

    def note_frames(self, frames: Iterable[bytes]) -> None:
        """Called with what has been heard, as it came, before it is decoded. The scheduler records it if so configured."""

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        """The next messages in offline mode. The offline subclass supplies it."""
        raise NotImplementedError("with offline_mode=True the subclass supplies offline_receive_msg(blocking)")

    def offline_send_result(self, reply: BaseTokenizerMsg) -> None:
        """Take a step's results in offline mode. The offline subclass supplies it."""
        raise NotImplementedError("with offline_mode=True the subclass supplies offline_send_result(reply)")


class _Transport(ABC):
    """What differs between the four: where messages come from, where results go, who waits for whom."""

    @abstractmethod
    def receive(self, blocking: bool) -> list[BaseBackendMsg]: ...

    @abstractmethod
    def send(self, reply: BaseTokenizerMsg) -> None: ...

    @abstractmethod
    def sync(self, timeout: timedelta) -> None: ...


class _Online(_Transport):
    """A transport that hears frames from a socket."""

    _owner: SchedulerIOMixin
    _inbox: ZmqPullQueue[BaseBackendMsg] | ZmqSubQueue[BaseBackendMsg]

    def receive(self, blocking: bool) -> list[BaseBackendMsg]:
        while True:
            frames = self._receive_frames(blocking)
            self._owner.note_frames(frames)
            messages = _decode(frames)
            if messages or not blocking:
                return messages

    @abstractmethod
    def _receive_frames(self, blocking: bool) -> list[bytes]:
        """What has arrived; if `blocking`, at least one frame. The same frames on every rank."""

    def _wait(self) -> list[bytes]:
        self._owner.run_when_idle()
        return [self._inbox.get_raw()]


class _SingleRank(_Online):
    """One rank: takes from the tokenizer side, answers the detokenizer."""

    def __init__(self, config: SchedulerConfig, owner: SchedulerIOMixin, opened: ExitStack) -> None:
        self._owner = owner
        self._inbox = opened.enter_context(
            ZmqPullQueue[BaseBackendMsg](config.zmq_backend_addr, create=True, decoder=BaseBackendMsg.decoder)
        )
        self._outbox = opened.enter_context(
            ZmqPushQueue[BaseTokenizerMsg](
                config.zmq_detokenizer_addr, create=config.backend_create_detokenizer_link, encoder=BaseTokenizerMsg.encoder
            )
        )

    def send(self, reply: BaseTokenizerMsg) -> None:
        if not isinstance(reply, BatchTokenizerMsg):
            self._outbox.put(reply)
        elif reply.data:
            self._outbox.put(reply if len(reply.data) > 1 else reply.data[0])

    def sync(self, timeout: timedelta) -> None:  # noqa: ARG002 - nobody to wait for
        return None

    def _receive_frames(self, blocking: bool) -> list[bytes]:
        first = self._wait() if blocking else []
        return first + self._drain()

    def _drain(self) -> list[bytes]:
        frames = []
        while not self._inbox.empty():
            frames.append(self._inbox.get_raw())
        return frames


class _FirstOfSeveral(_SingleRank):
    """Rank 0 of several: a single rank that also hands on every frame, as the bytes that came, before it looks into them."""

    def __init__(
        self, config: SchedulerConfig, owner: SchedulerIOMixin, opened: ExitStack, group: dist.ProcessGroup, subscribe_timeout: float
    ) -> None:
        super().__init__(config, owner, opened)
        self._group = group
        self._others = opened.enter_context(
            ZmqPubQueue[BaseBackendMsg](config.zmq_scheduler_broadcast_addr, create=True, encoder=BaseBackendMsg.encoder)
        )
        self._others.wait_for_subscribers(config.tp_info.size - 1, subscribe_timeout)

    def sync(self, timeout: timedelta) -> None:
        dist.monitored_barrier(self._group, timeout, wait_all_ranks=True)

    def _receive_frames(self, blocking: bool) -> list[bytes]:
        first = self._wait() if blocking else []
        self._hand_on(first)  # at once: the others wait for it outside of any collective
        rest = self._drain()
        _announce(self._group, len(rest), self._owner.step_digests())
        self._hand_on(rest)
        return first + rest

    def _hand_on(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._others.put_raw(frame)


class _Follower(_Online):
    """Any other rank: takes exactly what rank 0 hands on, and says nothing."""

    def __init__(self, config: SchedulerConfig, owner: SchedulerIOMixin, opened: ExitStack, group: dist.ProcessGroup) -> None:
        self._owner = owner
        self._group = group
        self._inbox = opened.enter_context(
            ZmqSubQueue[BaseBackendMsg](config.zmq_scheduler_broadcast_addr, create=False, decoder=BaseBackendMsg.decoder)
        )

    def send(self, reply: BaseTokenizerMsg) -> None:  # noqa: ARG002 - rank 0 sends the same reply
        return None

    def sync(self, timeout: timedelta) -> None:
        dist.monitored_barrier(self._group, timeout, wait_all_ranks=True)

    def _receive_frames(self, blocking: bool) -> list[bytes]:
        first = self._wait() if blocking else []
        # A count, never emptiness: a subscription cannot say "everything so far".
        num_more, *digests = _announce(self._group, 0, NO_DIGESTS)
        self._owner.check_agreement(digests)
        return first + [self._inbox.get_raw() for _ in range(num_more)]

    def _wait(self) -> list[bytes]:
        self._owner.run_when_idle()
        while True:
            with suppress(TimeoutError):
                return [self._inbox.get_raw(LOOK_UP_S)]
            self._owner.look_up()


class _Offline(_Transport):
    """One rank whose subclass is both ends."""

    def __init__(self, owner: SchedulerIOMixin) -> None:
        self._owner = owner

    def receive(self, blocking: bool) -> list[BaseBackendMsg]:
        messages = self._owner.offline_receive_msg(blocking)
        self._owner.note_frames(BaseBackendMsg.encoder(message) for message in messages)
        return _unpack(messages)

    def send(self, reply: BaseTokenizerMsg) -> None:
        self._owner.offline_send_result(reply)

    def sync(self, timeout: timedelta) -> None:  # noqa: ARG002 - nobody to wait for
        return None


def _make_transport(
    config: SchedulerConfig, group: dist.ProcessGroup | None, owner: SchedulerIOMixin, opened: ExitStack, subscribe_timeout: float
) -> _Transport:
    """The transport for this rank. Every socket it opens goes onto `opened`."""
    tp_info = config.tp_info
    if config.offline_mode:
        return _Offline(owner)
    if tp_info.size == 1:
        return _SingleRank(config, owner, opened)
    if group is None:
        raise ConfigError(f"tp_cpu_group: None found; {tp_info.size} ranks need a gloo group of all of them")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (rank, size) != (tp_info.rank, tp_info.size):
        raise ConfigError(f"tp_cpu_group: rank {rank} of {size} found; tp_info says rank {tp_info.rank} of {tp_info.size}")
    if tp_info.is_primary():
        return _FirstOfSeveral(config, owner, opened, group, subscribe_timeout)
    return _Follower(config, owner, opened, group)


def _announce(group: dist.ProcessGroup, num_frames: int, digests: Sequence[int]) -> list[int]:
    """Rank 0's `num_frames` and `digests`, on every rank. One int64 tensor travels: count, step, a digest per field."""
    announcement = torch.tensor([num_frames, *digests], dtype=torch.int64)
    dist.broadcast(announcement, group=group, group_src=0)
    values: list[int] = announcement.tolist()
    return values


def _decode(frames: list[bytes]) -> list[BaseBackendMsg]:
    """The messages in `frames`, batches unpacked. Drops the same frames on every rank, for the bytes alone decide."""
    decoded = [decode_or_drop(BaseBackendMsg.decoder, frame) for frame in frames]
    return _unpack([message for message in decoded if message is not None])


def _unpack(messages: list[BaseBackendMsg]) -> list[BaseBackendMsg]:
    flat: list[BaseBackendMsg] = []
    for message in messages:
        flat.extend(message.data if isinstance(message, BatchBackendMsg) else [message])
    return flat
