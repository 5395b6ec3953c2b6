"""The agreement check: ranks that keep one ledger say nothing, a rank that does not is caught at the step that shows it, and named."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from minisgl.core import SamplingParams
from minisgl.message import AbortBackendMsg, BaseBackendMsg, BaseTokenizerMsg, BatchBackendMsg, BatchTokenizerMsg, ExitMsg, UserMsg
from minisgl.processes.served_scheduler import ServedScheduler
from minisgl.replay import replay
from minisgl.scheduler import SchedulerConfig
from minisgl.scheduler.agreement import (
    FIELDS,
    NO_DIGESTS,
    DivergedError,
    StepLog,
    TracedAllocator,
    explain_divergence,
    first_difference,
    show_values,
    steps_path,
)
from minisgl.scheduler.io import SchedulerIOMixin
from minisgl.utils import ZmqPullQueue, ZmqPushQueue, run_directory
from minisgl.utils.heartbeat import Heart, make_heartbeat_file
from tests.scheduler.fake_engine import LIMITS, FakeEngine, make
from tests.tools.fork_server import fork_server

DEADLINE_S = 120.0
VOCAB_SIZE = LIMITS.vocab_size


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Where the even and the odd ranks are forked: strings have other hashes on those than on these."""
    with ExitStack() as stack:
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        yield [
            stack.enter_context(
                fork_server(
                    "tests.scheduler.agreement_rank", tmp_path_factory.mktemp(f"rank{rank}"), PYTHONHASHSEED=str(rank + 1), **settings
                )
            )
            for rank in range(2)
        ]


class Ranks:
    """The rank processes of one test. They are the test's and nobody else's."""

    def __init__(self, servers, fault, size, directory):
        self.suffix = f"test-{secrets.token_hex(6)}"
        self.results = [directory / f"{self.suffix}.{rank}" for rank in range(size)]
        self.processes = []
        for rank, result in enumerate(self.results):
            words = [fault, str(rank), str(size), self.suffix, str(directory / "rendezvous"), str(result)]
            self.processes.append(servers[rank % 2].start(*words))

    def wait_for(self, path, rank):
        """Wait until the file is there; fail with what the rank has said if it ends without."""
        deadline = time.monotonic() + DEADLINE_S
        while not path.exists():
            has_ended = self.processes[rank].poll() is not None
            assert not has_ended or path.exists(), f"rank {rank} ended:\n{self.processes[rank].errors()}"
            assert time.monotonic() < deadline, f"rank {rank} has not written {path.name}"
            threading.Event().wait(0.01)

    def result(self, rank):
        self.wait_for(self.results[rank], rank)
        return json.loads(self.results[rank].read_text())

    def last_steps(self, rank):
        """Ask for them; the ranks that differ have written theirs already."""
        if not steps_path(self.suffix, rank).exists():
            self.processes[rank].stdin.write("write\n")
            self.wait_for(self.results[rank].with_name(f"{self.results[rank].name}.asked"), rank)
        return {step["step"]: step for step in json.loads(steps_path(self.suffix, rank).read_text())["steps"]}

    def clean_up(self):
        for process in self.processes:
            process.kill()
        for path in (*run_directory().glob(f"{self.suffix}.*"), *run_directory().glob(f"diverged-{self.suffix}.*")):
            path.unlink()


@contextmanager
def running(servers, fault, size, directory):
    ranks = Ranks(servers, fault, size, directory)
    config = SchedulerConfig(model_path="unused", _unique_suffix=ranks.suffix)
    try:
        with (
            ZmqPushQueue[BaseBackendMsg](config.zmq_backend_addr, create=False, encoder=BaseBackendMsg.encoder) as push,
            ZmqPullQueue[BaseTokenizerMsg](config.zmq_detokenizer_addr, create=False, decoder=BaseTokenizerMsg.decoder) as pull,
        ):
            yield ranks, push, pull
    finally:
        ranks.clean_up()


def user_msg(uid, prompt, **params):
    return UserMsg(uid, np.array(prompt, dtype=np.int32), SamplingParams(**params))


def endings(pull):
    """Uids that the next reply ends."""
    reply = pull.get(DEADLINE_S)
    messages = reply.data if isinstance(reply, BatchTokenizerMsg) else [reply]
    return [message.uid for message in messages if getattr(message, "finished", False)]


# Planted faults, one each

FAULTS = {
    "set order": {"uids", "lengths", "inputs"},
    "local clock": {"uids", "lengths", "inputs"},
    "extra random call": {"uids", "lengths", "inputs"},
    "dropped message": {"uids"},
    "swapped uids": {"uids", "lengths", "inputs"},
    "one page": {"pages_taken"},
    "weights": {"tokens"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_differs_is_caught_at_the_step_that_shows_it_and_named_with_both_values(servers, fault, tmp_path):
    draw = random.Random(1)
    with running(servers, fault, 2, tmp_path) as (ranks, push, _):
        requests = [
            user_msg(uid, draw.choices(range(VOCAB_SIZE), k=5 + uid), max_tokens=40, ignore_eos=True, temperature=0.0) for uid in range(8)
        ]
        push.put(BatchBackendMsg(requests))
        step, field, rank = ranks.result(1)["diverged"]
        assert rank == 1
        assert field in FAULTS[fault]
        ours, theirs = ranks.last_steps(0), ranks.last_steps(1)
        assert min(step for step in ours.keys() & theirs.keys() if ours[step] != theirs[step]) == step
        assert max(theirs) == step, "it went on after the digests that show it"
        assert next(name for name in FIELDS if ours[step][name] != theirs[step][name]) == field
        text = explain_divergence(ranks.suffix, step, field, rank)
        start = f"rank 1 differs from rank 0 at step {step} in: {field}; "
        assert text.startswith(start + show_values("rank 0 has", ours[step][field], "rank 1 has", theirs[step][field]))
        assert all(str(steps_path(ranks.suffix, rank)) in text for rank in (0, 1))
        assert [os.stat(steps_path(ranks.suffix, rank)).st_mode & 0o777 for rank in (0, 1)] == [0o600, 0o600]
        assert max(len(ours), len(theirs)) <= 16
        assert not ranks.results[0].exists()


# Nothing to report


SIZES = [(4, 100), pytest.param(2, 700, marks=pytest.mark.slow), pytest.param(4, 700, marks=pytest.mark.slow)]
"""Ranks and requests; of these 700 come to 2,000 steps"""


@pytest.mark.parametrize(("size", "num_requests"), SIZES)
@pytest.mark.timeout(300)
def test_random_steps_are_planned_alike_on_every_rank_and_replayed_also_if_one_was_stopped(servers, size, num_requests, tmp_path):
    draw = random.Random(size)
    stems = [draw.choices(range(VOCAB_SIZE), k=40) for _ in range(4)]
    most_stops = -(-num_requests // 140)
    with running(servers, "", size, tmp_path) as (ranks, push, pull):
        pids = [process.pid for process in ranks.processes]
        num_sent, open_uids, num_stops, num_aborts = 0, set(), 0, 0
        while num_sent < num_requests or open_uids:
            while num_sent < num_requests and len(open_uids) < 14:
                messages = []
                for _ in range(draw.choice((1, 1, 2, 5))):
                    stem = draw.choice(stems)[: draw.choice((0, 4, 8, 40))]
                    prompt = stem + draw.choices(range(VOCAB_SIZE), k=draw.choice((0, 1, 9))) or [1]
                    messages.append(user_msg(num_sent, prompt, max_tokens=draw.randint(1, 60), seed=draw.randrange(3)))
                    open_uids.add(num_sent)
                    num_sent += 1
                if draw.random() < 0.3:
                    uid = draw.choice(sorted(open_uids))
                    messages.append(AbortBackendMsg(uid))
                    open_uids.discard(uid)
                    num_aborts += 1
                push.put(BatchBackendMsg(messages))
            if num_stops < most_stops and num_sent > num_requests * (num_stops + 1) // (most_stops + 1):
                num_stops += 1
                os.kill(pids[size - 1], signal.SIGSTOP)
                threading.Timer(0.3, os.kill, (pids[size - 1], signal.SIGCONT)).start()
            open_uids -= set(endings(pull)) if open_uids else set()
        push.put(ExitMsg())
        results = [ranks.result(rank) for rank in range(size)]
    assert results == [results[0]] * size
    assert results[0]["num_steps"] >= num_requests * 20 // 7
    assert results[0]["num_retractions"] > 0
    assert (num_stops, num_aborts > num_requests // 35) == (most_stops, True)
    outcome = replay(tmp_path / "recording")
    assert (outcome.difference, outcome.is_complete, outcome.num_ranks) == (None, True, size)
    assert outcome.num_steps == results[0]["num_steps"]


@pytest.mark.timeout(300)
def test_5000_messages_behind_a_slow_follower_are_all_heard(servers, tmp_path):
    num_messages = 5000
    with running(servers, "loose", 2, tmp_path) as (ranks, push, pull):
        push.put(user_msg(0, [1, 2], max_tokens=1))
        assert endings(pull) == [0]
        slow = ranks.processes[1].pid
        os.kill(slow, signal.SIGSTOP)
        for uid in range(1, num_messages):
            push.put(user_msg(uid, [uid % 50, 2], max_tokens=1) if uid % 10 == 0 else AbortBackendMsg(uid))
        for _ in range(10):  # it takes them bit by bit, while rank 0 hands them on at once
            os.kill(slow, signal.SIGCONT)
            threading.Event().wait(0.005)
            os.kill(slow, signal.SIGSTOP)
            threading.Event().wait(0.02)
        os.kill(slow, signal.SIGCONT)
        push.put(ExitMsg())
        results = [ranks.result(rank) for rank in range(2)]
    assert [result["num_heard"] for result in results] == [num_messages + 1] * 2
    assert results[0] == results[1]


# The parts


def handled(tokens):
    """A log whose one step is a scheduler's first."""
    scheduler, engine = make()
    scheduler.add([1, 2, 3, 4, 5])
    scheduler.run_step()
    allocator = TracedAllocator(8)
    log = StepLog(allocator, rank=1)
    allocator.free(allocator.alloc(3)[:2])
    step = log.note(engine.batches[0], np.array(tokens, dtype=np.int32))
    return log, step


def test_a_step_is_its_fields_in_plain_and_a_stable_digest_of_each():
    log, step = handled([7])
    assert step.values() == {
        "uids": [0],
        "lengths": [0, 5],
        "inputs": [1, 2, 3, 4, 5],
        "pages_taken": [0, 1, 2],
        "pages_freed": [0, 1],
        "page_table": [0, 0, 0, 0, 1, 1],
        "tokens": [7],
    }
    assert tuple(step.values()) == FIELDS
    assert log.digests == (0, *step.digests)
    # Golden: other processes, machines and versions must come to the same numbers.
    assert step.digests[-1] == GOLDEN_DIGEST_OF_7
    assert handled([7])[1].digests == step.digests
    assert [one != other for one, other in zip(handled([8])[1].digests, step.digests, strict=True)] == [False] * 6 + [True]


GOLDEN_DIGEST_OF_7 = 3584644612529117715


def test_an_empty_field_has_digest_0_and_no_step_has_none():
    log, step = handled([])
    assert step.digests[-1] == 0
    assert StepLog(TracedAllocator(1), 1).digests == NO_DIGESTS == (-1, *[0] * len(FIELDS))
    log.check(log.digests)


@pytest.mark.parametrize("place", range(len(FIELDS) + 1))
def test_the_first_field_that_differs_is_named(place):
    log, _ = handled([7])
    theirs = list(log.digests)
    theirs[place] += 1
    theirs[-1] += 1
    with pytest.raises(DivergedError) as caught:
        log.check(theirs)
    assert (caught.value.field, caught.value.step, caught.value.rank) == (("step", *FIELDS)[place], theirs[0], 1)


def test_lists_are_shown_from_where_they_differ():
    assert show_values("a", [1, 2], "b", [1]) == "a [1, 2], b [1]"
    assert first_difference([1, 2], [1]) == 1
    ours, theirs = list(range(100)), list(range(100))
    theirs[50] = 7
    text = show_values("a", ours, "b", theirs)
    assert text.startswith("a [..., 48, 49, 50, 51,")
    assert "b [..., 48, 49, 7, 51," in text
    assert text.endswith(", ...]")


def test_a_step_that_rank_0_has_not_kept_is_said_to_be_missing():
    suffix = f"test-{secrets.token_hex(6)}"
    log, _ = handled([7])
    try:
        log.write(steps_path(suffix, 1))
        assert "rank 0 has not kept this step; rank 1 has [7]" in explain_divergence(suffix, 0, "tokens", 1)
        log.write(steps_path(suffix, 0))
        assert "rank 0 has [7], rank 1 has [7]" in explain_divergence(suffix, 0, "tokens", 1)
        assert "rank 1 has [0]" in explain_divergence(suffix, 5, "step", 1)
    finally:
        for rank in (0, 1):
            steps_path(suffix, rank).unlink(missing_ok=True)


def test_one_rank_makes_no_digests_and_io_alone_has_none():
    scheduler, _ = make()
    scheduler.add([1, 2, 3], max_tokens=2)
    scheduler.finish()
    assert scheduler.step_digests() == NO_DIGESTS
    config = SchedulerConfig(model_path="unused", _unique_suffix=f"test-{secrets.token_hex(6)}")
    io = SchedulerIOMixin(config, None)
    assert io.step_digests() == NO_DIGESTS
    io.check_agreement((5, *range(len(FIELDS))))
    io.close()


def test_a_traced_allocator_counts_as_the_plain_one():
    allocator = TracedAllocator(6)
    pages = allocator.alloc(4)
    allocator.free(pages[1:3])
    assert allocator.take_trace() == (pages.tobytes(), pages[1:3].tobytes())
    assert allocator.take_trace() == (b"", b"")
    allocator.check_integrity()
    assert allocator.num_free == 4


def test_a_rank_that_waits_says_so_only_if_rank_0_is_at_work_for_seconds():
    heart_fd = make_heartbeat_file(1)
    config = SchedulerConfig(model_path="unused", offline_mode=True)
    scheduler = ServedScheduler(config, FakeEngine(LIMITS), Heart(heart_fd, 0))
    os.close(heart_fd)
    scheduler.look_up()  # nobody watches
    busy = [True, True, False, True, True, True]
    scheduler.watch_primary(lambda: busy.pop(0))
    for _ in range(5):
        scheduler.look_up()
    with pytest.raises(DivergedError, match="rank 0 differs from rank 0 at step 0 in: waiting"):
        scheduler.look_up()
