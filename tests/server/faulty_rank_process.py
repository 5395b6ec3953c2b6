"""A scheduler process whose rank FAULTY_RANK (1) may have a fault: the real scheduler around a fake engine, or around a real one.

FAULT is `token:N` (in steps that sample N tokens or more, the last one is another), `deaf` (requests are not heard), `SIGNAL:STATE` (it
sends this signal to itself, while it loads (`start`), in a step with a long prompt (`prefill`) or in one with nothing but the next tokens
of FULL requests (`decode`), and says so before), `weight:NAME` (a real engine's parameter NAME is another) or empty. ENGINE is `fake` or
`real`. Run as a child by the launcher.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from functools import partial

import torch

from minisgl.distributed.groups import join_groups
from minisgl.engine import engine as engine_module
from minisgl.engine.engine import make_engine
from minisgl.message import UserMsg
from minisgl.models.weights import load_weights
from minisgl.processes.child import Child, run_child
from minisgl.processes.served_scheduler import ServedScheduler, serve_scheduler
from minisgl.utils import make_private_directory
from tests.server.fake_engine_process import BYTE_LIMITS, ForgetfulEngine

FULL = 4
LONG = 64
"""A step with more tokens of one request has a part of a long prompt."""
SIGNALLED = "the signal comes now"


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


class SignalledEngine:
    """Another engine, except that in a certain step a signal comes."""

    def __init__(self, engine, child, name, state) -> None:
        self._engine, self._child, self._name, self._state = engine, child, name, state
        self.limits, self.cpu_group = engine.limits, engine.cpu_group

    def submit(self, batch):
        most = max(batch.extend_lens)
        if most > LONG if self._state == "prefill" else most == 1 and len(batch.uids) == FULL:
            signal_self(self._child, self._name)
        return self._engine.submit(batch)


def signal_self(child, name):
    child.report("stage", SIGNALLED)
    os.kill(os.getpid(), signal.Signals[name])


class FaultyScheduler(ServedScheduler):
    def receive_msg(self, blocking: bool = False):
        messages = super().receive_msg(blocking)
        return [message for message in messages if not isinstance(message, UserMsg) or len(message.input_ids) == 1]


def load_other_weights(name, model, *where):
    """As `load_weights`, but for one number."""
    load_weights(model, *where)
    model.state_dict()[name].view(-1)[0] += 1e-3


def main(child: Child) -> None:
    torch.set_num_threads(1)
    config, fault = child.config, os.environ.get("FAULT", "")
    is_faulty = config.tp_info.rank == int(os.environ.get("FAULTY_RANK", "1"))
    name, _, state = fault.partition(":") if is_faulty and fault.startswith("SIG") else ("", "", "")
    if state == "start":
        signal_self(child, name)
    if fault.startswith("weight") and is_faulty:
        engine_module.load_weights = partial(load_other_weights, fault.partition(":")[2])
    if os.environ["ENGINE"] == "real":
        engine = make_engine(config, config.rendezvous_path)
    else:
        engine = ForgetfulEngine(replace(BYTE_LIMITS, num_pages=40_000, max_seq_len=32_000))
        make_private_directory(config.rendezvous_path.parent)
        engine.cpu_group = join_groups(config.tp_info, config.rendezvous_path, torch.device("cpu")).cpu
    if state in ("prefill", "decode"):
        engine = SignalledEngine(engine, child, name, state)
    if fault.startswith("token") and is_faulty:
        engine = FaultyEngine(engine, int(fault.split(":")[1]))
    kind = FaultyScheduler if fault == "deaf" and is_faulty else ServedScheduler
    serve_scheduler(child, kind(config, engine, child.heart))


if __name__ == "__main__":
    sys.exit(run_child(main))
