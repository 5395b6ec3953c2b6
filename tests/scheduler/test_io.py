"""The four transports: every rank hears the same bytes in the same order, one rank answers, and nothing waits for ever."""

from __future__ import annotations

import json
import pickle
import random
import secrets
from contextlib import contextmanager

import numpy as np
import pytest

from minisgl.core import SamplingParams
from minisgl.distributed import DistributedInfo
from minisgl.errors import ClosedError, ConfigError
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    BaseTokenizerMsg,
    BatchBackendMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    ExitMsg,
    UserMsg,
)
from minisgl.scheduler import SchedulerConfig, SchedulerIOMixin
from minisgl.utils import ZmqPullQueue, ZmqPushQueue, run_directory, wait_any
from tests.tools.fork_server import fork_server

DEADLINE_S = 110.0
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

BAD_FRAMES = (b"", b"\0", b"\xff" * 31, pickle.dumps({"uid": 1}), BaseTokenizerMsg.encoder(DetokenizeMsg(uid=1, next_token=2)))


def make_config(**changes):
    return SchedulerConfig(**{"model_path": "unused", "_unique_suffix": f"test-{secrets.token_hex(6)}", **changes})


def user_msg(uid, num_tokens=3):
    return UserMsg(uid=uid, input_ids=np.arange(num_tokens, dtype=np.int32), sampling_params=SamplingParams(max_tokens=uid + 1))


def push_to(config):
    return ZmqPushQueue[BaseBackendMsg](config.zmq_backend_addr, create=False, encoder=BaseBackendMsg.encoder)


def pull_replies(config, create=False):
    return ZmqPullQueue[BaseTokenizerMsg](config.zmq_detokenizer_addr, create=create, decoder=BaseTokenizerMsg.decoder)


class Listener(SchedulerIOMixin):
    """Counts how often it was idle, and then does what a test wants to happen before the wait."""

    num_idle = 0

    def run_when_idle(self):
        self.num_idle += 1
        self.when_idle()

    def when_idle(self):
        pass


@contextmanager
def listening(config, **arguments):
    listener = Listener(config, None, **arguments)
    try:
        yield listener
    finally:
        listener.close()


def receive(listener, num_messages):
    """Messages from calls that do not wait, until there are enough; the test's own time-out ends a loop that never gets them."""
    heard = []
    while len(heard) < num_messages:
        heard += listener.receive_msg(blocking=False)
    return heard


def uids(messages):
    return [message.uid for message in messages]


# One rank


def test_a_single_rank_takes_all_that_has_arrived_in_order():
    config = make_config()
    with listening(config) as listener, push_to(config) as push:
        assert listener.receive_msg(blocking=False) == []
        for uid in range(3):
            push.put(user_msg(uid))
        assert uids(receive(listener, 3)) == [0, 1, 2]
        assert listener.receive_msg() == []
        assert listener.num_idle == 0


def test_a_single_rank_is_idle_before_it_waits_and_only_when_it_may_wait():
    config = make_config()
    with listening(config) as listener, push_to(config) as push:
        listener.when_idle = lambda: push.put(user_msg(listener.num_idle))
        assert uids(listener.receive_msg(blocking=True))[:1] == [1]
        assert listener.num_idle == 1
        listener.receive_msg(blocking=False)
        assert listener.num_idle == 1


def test_batches_are_unpacked_in_order():
    config = make_config()
    with listening(config) as listener, push_to(config) as push:
        push.put(user_msg(0))
        push.put(BatchBackendMsg(data=[user_msg(1), AbortBackendMsg(uid=0), user_msg(2)]))
        push.put(BatchBackendMsg(data=[]))
        push.put(AbortBackendMsg(uid=1))
        heard = receive(listener, 5)
    assert uids(heard) == [0, 1, 0, 2, 1]
    assert [type(message) for message in heard] == [UserMsg, UserMsg, AbortBackendMsg, UserMsg, AbortBackendMsg]


def test_a_wait_goes_on_after_frames_that_hold_no_message(caplog):
    config = make_config()
    with listening(config) as listener, push_to(config) as push:
        for frame in BAD_FRAMES:
            push.put_raw(frame)
        push.put(BatchBackendMsg(data=[]))
        listener.when_idle = lambda: push.put(AbortBackendMsg(uid=5)) if listener.num_idle > 1 else None
        assert uids(listener.receive_msg(blocking=True))[:1] == [5]
    lengths = [f"{len(frame)} bytes" for frame in BAD_FRAMES]
    assert [length for record, length in zip(caplog.records, lengths, strict=True) if length in record.getMessage()] == lengths


@pytest.mark.parametrize("create", [True, False])
def test_results_go_to_the_detokenizer_one_alone_and_several_together(create):
    config = make_config(backend_create_detokenizer_link=create)
    one, two = DetokenizeMsg(uid=1, next_token=5), DetokenizeMsg(uid=2, next_token=6, finished=True, finish_reason="stop")
    with listening(config) as listener, pull_replies(config, create=not create) as pull:
        listener.send_result(BatchTokenizerMsg(data=[one]))
        listener.send_result(BatchTokenizerMsg(data=[]))
        listener.send_result(BatchTokenizerMsg(data=[one, two]))
        listener.send_result(two)
        assert [pull.get(DEADLINE_S) for _ in range(3)] == [one, BatchTokenizerMsg(data=[one, two]), two]
        assert pull.empty()


def test_a_single_rank_has_nobody_to_wait_for_and_leaves_no_file():
    config = make_config()
    with listening(config) as listener:
        listener.sync_all_ranks()
        assert len(list(run_directory().glob(f"{config._unique_suffix}.*"))) == 2
    assert list(run_directory().glob(f"{config._unique_suffix}.*")) == []
    with pytest.raises(ClosedError):
        listener.receive_msg()


def test_a_second_scheduler_with_the_same_suffix_is_refused_and_closes_what_it_opened():
    config = make_config()
    with listening(config) as listener, push_to(config) as push:
        with pytest.raises(ConfigError, match="live server"):
            Listener(config, None)
        push.put(user_msg(7))
        assert uids(receive(listener, 1)) == [7]
    with pull_replies(config, create=True), pytest.raises(ConfigError, match="live server"):
        Listener(config, None)  # fails at its second socket
    with listening(config):
        pass


def test_a_scheduler_must_say_what_it_does_when_idle():
    config = make_config()
    scheduler = SchedulerIOMixin(config, None)
    with pytest.raises(NotImplementedError, match="run_when_idle"):
        scheduler.receive_msg(blocking=True)
    scheduler.close()


# Offline


class Offline(SchedulerIOMixin):
    def __init__(self, config):
        super().__init__(config, None)
        self.calls = []
        self.results = []

    def offline_receive_msg(self, blocking=False):
        self.calls.append(blocking)
        return [BatchBackendMsg(data=[user_msg(1), user_msg(2)]), AbortBackendMsg(uid=1)] if blocking else []

    def offline_send_result(self, reply):
        self.results.append(reply)


def test_offline_the_subclass_is_both_ends_and_no_socket_is_opened():
    config = make_config(offline_mode=True)
    offline = Offline(config)
    assert offline.receive_msg(blocking=False) == []
    assert uids(offline.receive_msg(blocking=True)) == [1, 2, 1]
    assert offline.calls == [False, True]
    reply = BatchTokenizerMsg(data=[DetokenizeMsg(uid=1, next_token=5)])
    offline.send_result(reply)
    assert offline.results == [reply]
    offline.sync_all_ranks()
    assert list(run_directory().glob(f"{config._unique_suffix}.*")) == []
    offline.close()


def test_offline_without_its_two_ends_says_what_is_missing():
    scheduler = SchedulerIOMixin(make_config(offline_mode=True), None)
    with pytest.raises(NotImplementedError, match="offline_receive_msg"):
        scheduler.receive_msg()
    with pytest.raises(NotImplementedError, match="offline_send_result"):
        scheduler.send_result(DetokenizeMsg(uid=1, next_token=5))


# Several ranks


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Where ranks are forked."""
    with fork_server("tests.scheduler.io_rank", tmp_path_factory.mktemp("ranks"), **SETTINGS) as server:
        yield server


class Ranks:
    """The rank processes of one test, and what they wrote."""

    def __init__(self, server, mode, size, directory):
        self.config = make_config()
        self.results = [directory / f"{self.config._unique_suffix}.{rank}" for rank in range(size)]
        rendezvous = str(directory / f"{self.config._unique_suffix}.rendezvous")
        self.processes = [
            server.start(mode, str(rank), str(size), self.config._unique_suffix, rendezvous, str(result))
            for rank, result in enumerate(self.results)
        ]

    def wait(self):
        """What each rank wrote, when all have ended well. From now on none hears anything on its standard input."""
        for rank, process in enumerate(self.processes):
            process.stdin.close()
            code = process.wait(DEADLINE_S)
            assert code == 0, f"rank {rank} ended with {code}:\n{process.errors()}"
        return [json.loads(result.read_text()) for result in self.results]

    def kill(self):
        for process in self.processes:
            process.kill()
        for path in self.files():
            path.unlink()

    def files(self):
        """What stands in the run directory for these ranks."""
        return list(run_directory().glob(f"{self.config._unique_suffix}.*"))


@contextmanager
def running(server, mode, size, directory):
    ranks = Ranks(server, mode, size, directory)
    try:
        yield ranks
    finally:
        ranks.kill()


def make_frames(rng, num_messages):
    """Bursts of encoded requests, aborts and batches of them."""
    frames = []
    for uid in range(num_messages):
        kind = rng.random()
        message = user_msg(uid, rng.choice([1, 7, 3000])) if kind < 0.7 else AbortBackendMsg(uid=uid)
        frames.append(BaseBackendMsg.encoder(BatchBackendMsg(data=[message, AbortBackendMsg(uid=uid)]) if kind > 0.9 else message))
    return frames


def num_requests(frames):
    messages = [BaseBackendMsg.decoder(frame) for frame in frames]
    flat = [part for message in messages for part in (message.data if isinstance(message, BatchBackendMsg) else [message])]
    return sum(isinstance(message, UserMsg) for message in flat)


def check_all_heard_the_same(results, sent):
    for result in results:
        assert result["frames"] == [frame.hex() for frame in sent]
        assert result["calls"] == results[0]["calls"]
    assert any(blocking for blocking, _ in results[0]["calls"])
    assert all(heard for blocking, heard in results[0]["calls"] if blocking)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_500_messages_in_bursts_reach_every_rank_byte_for_byte_and_are_answered_once(server, size, tmp_path):
    rng = random.Random(size)
    frames = make_frames(rng, 500)
    exit_frame = BaseBackendMsg.encoder(ExitMsg())
    answered = []
    with (
        running(server, "answer", size, tmp_path) as ranks,
        push_to(ranks.config) as push,
        pull_replies(ranks.config) as pull,
    ):
        start = 0
        while start < len(frames):
            burst = frames[start : start + rng.choice([1, 2, 20, 100])]
            start += len(burst)
            for frame in burst:
                push.put_raw(frame)
            # After half of the bursts, let the ranks come to rest, so that they wait for the next one.
            while rng.random() < 0.5 and len(answered) < num_requests(frames[:start]):
                answered += answers(pull)
        push.put_raw(exit_frame)
        results = ranks.wait()
        while len(answered) < num_requests(frames):
            answered += answers(pull)
        assert not wait_any([pull], 0.2)
        assert ranks.files() == []
    check_all_heard_the_same(results, [*frames, exit_frame])
    assert len(answered) == len(set(answered)) == num_requests(frames)
    for result in results:
        assert result["num_idle"] >= sum(blocking for blocking, _ in result["calls"])


def answers(pull):
    reply = pull.get(DEADLINE_S)
    return uids(reply.data if isinstance(reply, BatchTokenizerMsg) else [reply])


def run_with_constructor_barrier_and_receive_only(server, size, directory, seed):
    """Nothing but the public contract, and messages that are on their way before any rank exists."""
    frames = [*make_frames(random.Random(seed), 20), BaseBackendMsg.encoder(ExitMsg())]
    with running(server, "listen", size, directory) as ranks, push_to(ranks.config) as push:
        for frame in frames:
            push.put_raw(frame)
        results = ranks.wait()
    check_all_heard_the_same(results, frames)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_constructor_barrier_and_receive_are_all_that_is_needed(server, size, tmp_path):
    run_with_constructor_barrier_and_receive_only(server, size, tmp_path, size)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 4])
def test_50_starts_never_hang(server, size, tmp_path):
    for run in range(50):
        run_with_constructor_barrier_and_receive_only(server, size, tmp_path, run)


def test_frames_that_hold_no_message_are_dropped_by_all_ranks_alike(server, tmp_path):
    frames = [*BAD_FRAMES, BaseBackendMsg.encoder(user_msg(1))]
    for uid, frame in enumerate(BAD_FRAMES):
        frames += [frame, BaseBackendMsg.encoder(AbortBackendMsg(uid=uid)), frame]
    frames.append(BaseBackendMsg.encoder(ExitMsg()))
    with running(server, "listen", 3, tmp_path) as ranks, push_to(ranks.config) as push:
        for frame in frames:
            push.put_raw(frame)
        results = ranks.wait()
    check_all_heard_the_same(results, frames)
    heard = [frame for _, call in results[0]["calls"] for frame in call]
    assert heard == [frame.hex() for frame in frames if frame not in BAD_FRAMES]


def test_rank_0_says_how_many_subscribed_when_some_do_not_come(server, tmp_path):
    with running(server, "lack subscribers", 2, tmp_path) as ranks:
        assert "0 of 1 subscribers" in ranks.wait()[0]["error"]


def test_the_barrier_names_the_ranks_that_are_missing(server, tmp_path):
    with running(server, "miss barrier", 4, tmp_path) as ranks:
        ranks.processes[0].wait(DEADLINE_S)
        error = ranks.wait()[0]["error"]
    assert "1, 3" in error


def test_several_ranks_need_their_group():
    with pytest.raises(ConfigError, match="tp_cpu_group"):
        Listener(make_config(tp_info=DistributedInfo(0, 2)), None)


def test_a_group_that_is_not_the_ranks_is_refused(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="rank 0 of 1 found; tp_info says rank 1 of 2"):
            Listener(make_config(tp_info=DistributedInfo(1, 2)), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_importing_the_io_layer_loads_no_model_code_and_no_transformers(server, tmp_path):
    """A rank of these tests imports the IO layer and little else."""
    heavy = (
        "minisgl.models",
        "minisgl.layers",
        "minisgl.engine.engine",
        "minisgl.attention",
        "minisgl.scheduler.scheduler",
        "transformers",
    )
    with running(server, "list modules", 1, tmp_path) as ranks:
        modules = ranks.wait()[0]["modules"]
    assert "minisgl.scheduler.io" in modules
    assert [name for name in modules if name.startswith(heavy)] == []
