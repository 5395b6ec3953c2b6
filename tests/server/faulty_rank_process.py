"""A scheduler process whose rank 1 may have a fault: the real scheduler around a fake engine, or around a real one.

FAULT is `token:N` (in steps that sample N tokens or more, the last one is another), `deaf` (requests are not heard) or empty. ENGINE is
`fake` or `real`. Run as a child by the launcher.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

from minisgl.distributed.groups import join_groups
from minisgl.engine.engine import make_engine
from minisgl.message import UserMsg
from minisgl.processes.child import Child, run_child
from minisgl.processes.served_scheduler import ServedScheduler, serve_scheduler
from minisgl.utils import make_private_directory
from tests.server.fake_engine_process import BYTE_LIMITS, ForgetfulEngine


class FaultyStep:
    def __init__(self, step) -> None:
        self._step = step

    def read(self):
        tokens = self._step.read()
        tokens[-1] = (tokens[-1] + 1) % 100
        return tokens

    def read_logprobs(self):
        return self._step.read_logprobs()


class FaultyEngine:
    """Another engine, except that it samples wrongly where there is much to do."""

    def __init__(self, engine, num_tokens) -> None:
        self._engine, self._num_tokens = engine, num_tokens
        self.limits, self.cpu_group = engine.limits, engine.cpu_group

    def submit(self, batch):
        step = self._engine.submit(batch)
        return FaultyStep(step) if len(batch.sample_rows) >= self._num_tokens else step


class FaultyScheduler(ServedScheduler):
    def receive_msg(self, blocking: bool = False):
        messages = super().receive_msg(blocking)
        return [message for message in messages if not isinstance(message, UserMsg) or len(message.input_ids) == 1]


def main(child: Child) -> None:
    torch.set_num_threads(1)
    config, fault = child.config, os.environ.get("FAULT", "")
    if os.environ["ENGINE"] == "real":
        engine = make_engine(config, config.rendezvous_path)
    else:
        engine = ForgetfulEngine(replace(BYTE_LIMITS, num_pages=40_000, max_seq_len=32_000))
        make_private_directory(config.rendezvous_path.parent)
        engine.cpu_group = join_groups(config.tp_info, config.rendezvous_path, torch.device("cpu")).cpu
    is_faulty = config.tp_info.rank == 1
    if fault.startswith("token") and is_faulty:
        engine = FaultyEngine(engine, int(fault.split(":")[1]))
    kind = FaultyScheduler if fault == "deaf" and is_faulty else ServedScheduler
    serve_scheduler(child, kind(config, engine, child.heart))


if __name__ == "__main__":
    sys.exit(run_child(main))
