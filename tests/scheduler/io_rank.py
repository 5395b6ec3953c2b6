"""One rank of the tests of the IO layer: a program that `test_io.py` starts, as other people's code would drive the mixin.

It is a fork of a process that has imported this module (tests/tools/fork_server.py). Arguments of `main`: mode, rank, number of ranks,
suffix, rendezvous file, result file. Writes what it heard as JSON and ends by itself.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from minisgl.distributed import DistributedInfo
from minisgl.errors import WorkerError
from minisgl.message import BaseBackendMsg, BatchTokenizerMsg, DetokenizeMsg, ExitMsg, UserMsg
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.io import SchedulerIOMixin

DEADLINE_S = 100


class Rank(SchedulerIOMixin):
    num_idle = 0

    def run_when_idle(self):
        self.num_idle += 1


def record_frames() -> list[str]:
    """Every frame that this process decodes from now on, as hex."""
    frames = []
    decode = BaseBackendMsg.decoder

    def decode_and_record(frame):
        frames.append(frame.hex())
        return decode(frame)

    BaseBackendMsg.decoder = staticmethod(decode_and_record)
    return frames


def listen(config, replies):
    """Receive until an ExitMsg has come; wait exactly when the call before brought nothing. With `replies`, answer each request."""
    frames = record_frames()
    rank = Rank(config, dist.group.WORLD)
    if replies:
        rank.sync_all_ranks()
    else:
        dist.barrier()
    calls = []
    blocking, done = True, False
    while not done:
        heard = rank.receive_msg(blocking=blocking)
        calls.append([blocking, [BaseBackendMsg.encoder(message).hex() for message in heard]])
        answers = [DetokenizeMsg(uid=message.uid, next_token=0) for message in heard if isinstance(message, UserMsg)]
        if replies:
            rank.send_result(BatchTokenizerMsg(data=answers))
        blocking = not heard
        done = any(isinstance(message, ExitMsg) for message in heard)
    if replies:
        rank.sync_all_ranks()
        rank.close()
        rank.close()
    return {"frames": frames, "calls": calls, "num_idle": rank.num_idle}


def lack_subscribers(config):
    """Rank 0 alone opens its sockets; the others do not come."""
    error = ""
    if config.tp_info.is_primary():
        try:
            Rank(config, dist.group.WORLD, subscribe_timeout=0.2)
        except WorkerError as caught:
            error = str(caught)
    dist.barrier()
    return {"error": error}


def miss_barrier(config):
    """The odd ranks stay away from the barrier until their standard input ends."""
    rank = Rank(config, dist.group.WORLD)
    error = ""
    if config.tp_info.rank % 2 == 0:
        try:
            rank.sync_all_ranks(timeout=3)
        except RuntimeError as caught:
            error = str(caught)
    if not config.tp_info.is_primary():
        sys.stdin.read()
    return {"error": error}


def main(mode: str, rank: str, size: str, suffix: str, rendezvous: str, result: str) -> None:
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    torch.set_num_threads(1)
    tp_info = DistributedInfo(int(rank), int(size))
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=tp_info.rank, world_size=tp_info.size)
    config = SchedulerConfig(model_path="unused", tp_info=tp_info, dtype=torch.float32, _unique_suffix=suffix)
    if mode == "lack subscribers":
        outcome = lack_subscribers(config)
    elif mode == "miss barrier":
        outcome = miss_barrier(config)
    elif mode == "list modules":
        outcome = {"modules": list(sys.modules)}
    else:
        outcome = listen(config, replies=mode == "answer")
    Path(result).write_text(json.dumps(outcome))
