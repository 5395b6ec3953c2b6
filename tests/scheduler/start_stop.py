"""Ranks that start, talk and end, again and again, at the level of the IO layer: no model. Started by test_start_stop.py.

    python -m tests.scheduler.start_stop CYCLES SIZE DIRECTORY

Each cycle is a fresh tokenizer side and SIZE fresh ranks. They are forks of this process, so that torch is imported once; it starts no
thread, makes no socket and joins no group itself. Writes a JSON line with what each cycle left behind and the longest one's seconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zmq

from minisgl.core import SamplingParams
from minisgl.distributed import DistributedInfo
from minisgl.distributed.groups import join_groups
from minisgl.message import BaseBackendMsg, BaseTokenizerMsg, BatchTokenizerMsg, DetokenizeMsg, ExitMsg, UserMsg
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.io import SchedulerIOMixin
from minisgl.utils import ZmqPullQueue, ZmqPushQueue, make_private_directory, run_directory

DEADLINE_S = 30.0
NUM_REQUESTS = 5


class Rank(SchedulerIOMixin):
    def run_when_idle(self):
        pass


def run_rank(config: SchedulerConfig) -> None:
    """Answer each request with its number of tokens until an ExitMsg comes."""
    rank = Rank(config, join_groups(config.tp_info, config.rendezvous_path, torch.device("cpu")).cpu)
    rank.sync_all_ranks()
    heard = []
    while not any(isinstance(message, ExitMsg) for message in heard):
        messages = rank.receive_msg(blocking=True)
        heard += messages
        answers = [DetokenizeMsg(message.uid, len(message.input_ids)) for message in messages if isinstance(message, UserMsg)]
        rank.send_result(BatchTokenizerMsg(answers))
    assert [message.uid for message in heard[:-1]] == list(range(NUM_REQUESTS))
    rank.sync_all_ranks()
    rank.close()
    if config.tp_info.is_primary():
        config.rendezvous_path.unlink()
    torch.distributed.destroy_process_group()


def run_tokenizer_side(config: SchedulerConfig) -> None:
    """The first request is on its way before there is a rank; the others follow each answer."""
    with (
        ZmqPullQueue[BaseTokenizerMsg](config.zmq_detokenizer_addr, create=True, decoder=BaseTokenizerMsg.decoder) as inbox,
        ZmqPushQueue[BaseBackendMsg](config.zmq_backend_addr, create=False, encoder=BaseBackendMsg.encoder) as outbox,
    ):
        for uid in range(NUM_REQUESTS):
            outbox.put(UserMsg(uid, np.arange(uid + 1, dtype=np.int32), SamplingParams(max_tokens=1)))
            assert inbox.get(DEADLINE_S) == DetokenizeMsg(uid, uid + 1)
        outbox.put(ExitMsg())


def fork(main: Callable[[SchedulerConfig], None], config: SchedulerConfig) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        main(config)
        zmq.Context.instance().term()  # os._exit would take along what has not been sent yet
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_cycle(number: int, size: int) -> list[str]:
    """What went wrong or was left behind."""
    suffix = f"cycle-{os.getpid()}-{number}"
    configs = [
        SchedulerConfig(
            model_path="unused",
            tp_info=DistributedInfo(rank, size),
            _unique_suffix=suffix,
            backend_create_detokenizer_link=False,
        )
        for rank in range(size)
    ]
    children = [fork(run_tokenizer_side, configs[0]), *(fork(run_rank, config) for config in configs)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    wrong = [f"process {place} ended with {status}" for place, status in enumerate(statuses) if status]
    return wrong + [path.name for path in run_directory().glob(f"{suffix}*")]


def main(num_cycles: int, size: int, result: Path) -> None:
    torch.set_num_threads(1)
    make_private_directory(run_directory())
    descriptors = len(os.listdir("/proc/self/fd"))
    wrong, longest = {}, 0.0
    for number in range(num_cycles):
        begin = time.monotonic()
        if found := run_cycle(number, size):
            wrong[number] = found
        longest = max(longest, time.monotonic() - begin)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started before a fork"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    result.write_text(json.dumps({"cycles": num_cycles, "wrong": wrong, "longest_s": longest}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
