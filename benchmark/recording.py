"""What `--record` costs a step, and what the digests cost that several ranks compare.

    python benchmark/recording.py [--out benchmark/results/recording.json] [--step-ms MS]

The scheduler of benchmark/host_time.py, whose engine returns at once, decodes with 1 to 256 requests: three of them side by side, one
plain, one that keeps digests only, one that records into a file, in blocks of steps that take turns. The time is that of the thread on its
core, system calls included, so that other programs on the machine disturb it little. The figures are medians over the blocks of a
block's mean, in microseconds per step; a cost is the median of the differences from the plain block beside it. A real model's step
takes its own time besides: `share_of_step` is the recording's share of one of `--step-ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import numpy as np
from host_time import VOCAB_SIZE, InstantEngine, yardstick_ms
from prefix_cache import hardware

from minisgl.core import SamplingParams
from minisgl.message import BaseBackendMsg, BaseTokenizerMsg, BatchTokenizerMsg, UserMsg
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.agreement import HandledStep
from minisgl.scheduler.recording import StepObserver

NUM_RUNNING = (1, 8, 64, 256)
PAGE_SIZE = 64
BLOCK_STEPS = 50
TARGET_SHARE = 0.02


class Nobody:
    """Looks at nothing: with it, a scheduler makes digests and that is all."""

    def begin_turn(self) -> None: ...

    def note_frames(self, frames: Iterable[bytes]) -> None: ...

    def note_step(self, handled: HandledStep) -> None: ...

    def close(self) -> None: ...


class Sink(Scheduler):
    """A scheduler that decodes so many requests and whose results are only counted."""

    def __init__(self, num_running: int, *, record: str | None = None, observer: StepObserver | None = None) -> None:
        self.inbox: list[BaseBackendMsg] = []
        self.num_tokens = 0
        config = SchedulerConfig(model_path="unused", offline_mode=True, record=record)
        super().__init__(config, InstantEngine(num_running, PAGE_SIZE), observer=observer)
        rng = np.random.default_rng(0)
        for uid in range(num_running):
            prompt = rng.integers(0, VOCAB_SIZE, 512).astype(np.int32)
            self.inbox.append(UserMsg(uid, prompt, SamplingParams(max_tokens=3500, ignore_eos=True)))
        while self.num_tokens < 40 * num_running:
            self.run_step()

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:  # noqa: ARG002 - there is always something to do
        inbox, self.inbox = self.inbox, []
        return inbox

    def offline_send_result(self, reply: BaseTokenizerMsg) -> None:
        assert isinstance(reply, BatchTokenizerMsg)
        self.num_tokens += len(reply.data)


def block_us(scheduler: Scheduler) -> float:
    """Mean microseconds of a step over a block of them."""
    start = time.thread_time_ns()
    for _ in range(BLOCK_STEPS):
        scheduler.run_step()
    return (time.thread_time_ns() - start) / 1e3 / BLOCK_STEPS


def measure(num_running: int, num_blocks: int, step_ms: float) -> dict[str, float]:
    """All three at one number of running requests."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "recording")
        schedulers = {
            "plain": Sink(num_running),
            "digests": Sink(num_running, observer=Nobody()),
            "recorded": Sink(num_running, record=path),
        }
        size = os.path.getsize(path)
        times: dict[str, list[float]] = {name: [] for name in schedulers}
        for block in range(num_blocks):
            names = list(schedulers)
            for name in names[block % 3 :] + names[: block % 3]:
                times[name].append(block_us(schedulers[name]))
        bytes_per_step = (os.path.getsize(path) - size) / (num_blocks * BLOCK_STEPS)
        schedulers["recorded"].end_recording()
    costs = {
        name: statistics.median(other - plain for other, plain in zip(times[name], times["plain"], strict=True))
        for name in ("digests", "recorded")
    }
    return {
        **{f"{name}_us": round(statistics.median(found), 2) for name, found in times.items()},
        "cost_of_digests_us": round(costs["digests"], 2),
        "cost_of_recording_us": round(costs["recorded"], 2),
        "bytes_per_step": round(bytes_per_step, 1),
        "share_of_step": round(costs["recorded"] / (step_ms * 1000), 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recording.json")
    parser.add_argument("--num-blocks", type=int, default=60, help=f"blocks of {BLOCK_STEPS} steps of each kind")
    parser.add_argument("--step-ms", type=float, default=3.0, help="a step of a real model, in milliseconds; 3 is a short one on a GPU")
    args = parser.parse_args()
    measured = {}
    print(
        f"{'running':>8}{'plain':>10}{'digests':>10}{'recorded':>10}   cost: digests, recording (us), share of a {args.step_ms:g} ms step"
    )
    for num_running in NUM_RUNNING:
        before = yardstick_ms()
        found = measure(num_running, args.num_blocks, args.step_ms)
        measured[str(num_running)] = {"yardstick_ms": before, **found}
        row = "".join(f"{found[f'{name}_us']:10.1f}" for name in ("plain", "digests", "recorded"))
        costs = f"{found['cost_of_digests_us']:8.1f}{found['cost_of_recording_us']:8.1f}{100 * found['share_of_step']:8.2f} %"
        print(f"{num_running:8}{row}{costs}")
    result = {
        "command": f"python benchmark/recording.py {' '.join(sys.argv[1:])}".strip(),
        "versions": {"minisgl": version("minisgl"), "python": python_version(), "numpy": version("numpy")},
        "hardware": hardware(),
        "config": {"num_blocks": args.num_blocks, "block_steps": BLOCK_STEPS, "page_size": PAGE_SIZE, "step_ms": args.step_ms},
        "target_share_of_step": TARGET_SHARE,
        "measured": measured,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
