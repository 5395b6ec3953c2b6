"""One rank with a fake engine, for `test_agreement.py`, and the faults that may be planted in it.

It is a fork of a process that has imported this module (tests/tools/fork_server.py). Arguments of `main`: fault ("" for none), rank,
number of ranks, suffix, rendezvous file, result file. Serves until an ExitMsg or until it differs from rank 0, and writes what it did as
JSON; rank 0 records beside it. A line on its standard input makes it write its last steps, whatever it is doing.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from minisgl.distributed import DistributedInfo
from minisgl.kvcache import PageAllocator
from minisgl.message import UserMsg
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.agreement import DivergedError, steps_path
from tests.scheduler.fake_engine import LIMITS, FakeEngine

DEADLINE_S = 150
FAULTY_STEP = 9


class Engine(FakeEngine):
    """As a real one, it waits for the other ranks in each step, unless `is_loose`. Remembers all plans as one hash."""

    def __init__(self, limits, *, is_loose, is_changed):
        super().__init__(limits)
        self.cpu_group = dist.group.WORLD
        self.num_steps = 0
        self.plans = hashlib.sha256()
        self._tensors = None if is_loose else dist.new_group(backend="gloo")
        self._is_changed = is_changed

    def submit(self, batch):
        self.batches.clear()
        self.events.clear()
        self.num_steps += 1
        self.plans.update(repr((batch.step, batch.uids, batch.layout)).encode() + batch.buffer.tobytes())
        if self._tensors is not None:
            dist.all_reduce(torch.zeros(4), group=self._tensors)
        return super().submit(batch)

    def read(self, step):
        tokens = super().read(step)
        if self._is_changed and step.batch.step >= FAULTY_STEP and len(tokens):
            tokens[-1] = (tokens[-1] + 1) % self.limits.vocab_size
        return tokens

    def close(self):
        pass


class Rank(Scheduler):
    """A scheduler that alters what it hears as the fault says: so would a scheduler whose code decides by such things."""

    def __init__(self, config, engine, fault):
        self._fault = fault
        self._rank = config.tp_info.rank
        self._draw = random.Random(0)
        self.num_heard = 0
        self.heard = hashlib.sha256()
        super().__init__(config, engine)

    def receive_msg(self, blocking=False):
        messages = super().receive_msg(blocking)
        for message in messages:
            self.num_heard += 1
            self.heard.update(repr((type(message).__name__, getattr(message, "uid", None))).encode())
        users = [message for message in messages if isinstance(message, UserMsg)]
        others = [message for message in messages if not isinstance(message, UserMsg)]
        return [*self._alter(users), *others] if self._fault else messages

    def _alter(self, users):
        fault, is_odd = self._fault, self._rank == 1
        if fault == "set order":
            order = list({str(message.uid) for message in users})
            return sorted(users, key=lambda message: order.index(str(message.uid)))
        if fault == "local clock":
            return sorted(users, key=lambda message: (time.monotonic_ns() // 100 % 2, message.uid))
        if fault == "extra random call":
            self._draw.random() if is_odd else None
            return sorted(users, key=lambda _: self._draw.random())
        if fault == "dropped message" and is_odd:
            return [message for message in users if message.uid != 3]
        if fault == "swapped uids" and is_odd and len(users) > 4:
            one, other = users[1], users[4]
            one.uid, other.uid = other.uid, one.uid
        return users


def change_one_page():
    """The allocator hands its pages out in another order, once."""
    calls = []
    alloc = PageAllocator.alloc

    def alloc_differently(allocator, num_pages):
        pages = alloc(allocator, num_pages)
        calls.append(num_pages)
        return pages[::-1].copy() if num_pages > 1 and sum(count > 1 for count in calls) == 3 else pages

    PageAllocator.alloc = alloc_differently


def main(fault, rank, size, suffix, rendezvous, result):
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    rank, size = int(rank), int(size)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    config = SchedulerConfig(
        model_path="unused",
        tp_info=DistributedInfo(rank, size),
        _unique_suffix=suffix,
        reserve_tokens=4,
        max_extend_tokens=24,
        max_extend_tokens_beside_decode=12,
        record=str(Path(result).with_name("recording")),
    )
    if fault == "one page" and rank == 1:
        change_one_page()
    engine = Engine(LIMITS, is_loose=fault == "loose", is_changed=fault == "weights" and rank == 1)
    scheduler = Rank(config, engine, "" if fault == "loose" else fault)

    def write_when_asked():
        for _ in sys.stdin:
            scheduler.write_last_steps(steps_path(suffix, rank))
            Path(f"{result}.asked").touch()

    threading.Thread(target=write_when_asked, daemon=True).start()
    outcome = {}
    try:
        scheduler.run_forever()
    except DivergedError as error:
        scheduler.write_last_steps(steps_path(suffix, rank))
        outcome["diverged"] = [error.step, error.field, error.rank]
    outcome.update(num_steps=engine.num_steps, plans=engine.plans.hexdigest(), num_retractions=scheduler.num_retractions)
    outcome.update(num_heard=scheduler.num_heard, heard=scheduler.heard.hexdigest())
    if not outcome.get("diverged"):
        scheduler.sync_all_ranks()
        scheduler.close()
    Path(f"{result}.new").write_text(json.dumps(outcome))
    os.replace(f"{result}.new", result)
    if outcome.get("diverged"):
        threading.Event().wait()  # the others are asked for their side; the test ends all
    os._exit(0)  # the groups' threads make an ordinary exit abort at times
