"""Host time of a step: a whole turn of the scheduler with an engine that returns at once, results sent to a sink.

    python benchmark/host_time.py [--out benchmark/results/host_time.json]

`decode`: all requests run, each turn plans one token each, allocates pages, and handles the results of the turn before. `churn`: the
same number of lanes, each starts a new request (prompts 100 to 1,024 tokens that share prefixes, outputs 100 to 1,024) when its last
one ends, so that admission, prefix matching, chunks and releases are in; the figure is the mean over all turns after the first ends.
Medians over the runs, in milliseconds. Beside each run stands the time of a fixed loop of plain Python, `yardstick_ms`: where it
doubles, the core was shared with somebody else and the run's figures doubled too. Nothing here needs a GPU or a model.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import cast

import numpy as np
from prefix_cache import hardware

from minisgl.core import Batch, Int32Array, SamplingParams
from minisgl.engine.base import EngineLimits, StepLogprobs
from minisgl.message import BaseBackendMsg, BaseTokenizerMsg, BatchTokenizerMsg, DetokenizeMsg, UserMsg
from minisgl.scheduler import Scheduler, SchedulerConfig

NUM_RUNNING = (1, 8, 64, 256)
PAGE_SIZES = (16, 64)
TARGETS_MS = {"1": 0.15, "256": 1.0}
MAX_SEQ_LEN = 40_960
VOCAB_SIZE = 151_936


@dataclass(frozen=True, slots=True)
class Tokens:
    """A step that is done."""

    tokens: Int32Array

    def read(self) -> Int32Array:
        return self.tokens

    def read_logprobs(self) -> StepLogprobs:
        raise NotImplementedError("no request here wants log probabilities")


class InstantEngine:
    """Samples the same token for every row."""

    def __init__(self, num_running: int, page_size: int) -> None:
        self.limits = EngineLimits(
            num_pages=num_running * 4096 // page_size,
            page_size=page_size,
            max_seq_len=MAX_SEQ_LEN,
            max_running_req=num_running,
            vocab_size=VOCAB_SIZE,
            device_type="cuda",
            is_asynchronous=True,
        )
        self.cpu_group = None
        self._ones = np.ones(num_running, dtype=np.int32)

    def submit(self, batch: Batch) -> Tokens:
        return Tokens(self._ones[: len(batch.sample_rows)])


class Sink(Scheduler):
    """A scheduler whose results are only counted."""

    def __init__(self, num_running: int, page_size: int) -> None:
        self.inbox: list[BaseBackendMsg] = []
        self.num_tokens = 0
        self.num_ended = 0
        super().__init__(SchedulerConfig(model_path="unused", offline_mode=True), InstantEngine(num_running, page_size))

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:  # noqa: ARG002 - there is always something to do
        inbox, self.inbox = self.inbox, []
        return inbox

    def offline_send_result(self, reply: BaseTokenizerMsg) -> None:
        assert isinstance(reply, BatchTokenizerMsg)
        messages = cast("list[DetokenizeMsg]", reply.data)
        self.num_tokens += len(messages)
        self.num_ended += sum([message.finished for message in messages])


def measure_decode(num_running: int, page_size: int, num_steps: int) -> dict[str, float]:
    """Milliseconds per turn while `num_running` requests decode."""
    scheduler = Sink(num_running, page_size)
    rng = np.random.default_rng(0)
    for uid in range(num_running):
        prompt = rng.integers(0, VOCAB_SIZE, 512).astype(np.int32)
        scheduler.inbox.append(UserMsg(uid, prompt, SamplingParams(max_tokens=3000, ignore_eos=True)))
    while scheduler.num_tokens < 40 * num_running:
        scheduler.run_step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        scheduler.run_step()
        times.append((time.perf_counter_ns() - start) / 1e6)
    assert scheduler.num_ended == 0, "all requests must run throughout"
    times.sort()
    return {"median_ms": round(statistics.median(times), 4), "p99_ms": round(times[len(times) * 99 // 100], 4)}


def measure_churn(num_running: int, page_size: int, num_requests: int) -> dict[str, float]:
    """Milliseconds per turn, a mean, while `num_running` lanes work through requests that come and go."""
    scheduler = Sink(num_running, page_size)
    draw = random.Random(0)
    stems = [[draw.randrange(10_000) for _ in range(1024)] for _ in range(8)]
    num_sent = num_steps = 0
    elapsed = 0.0
    while scheduler.num_ended < num_requests:
        while num_sent < scheduler.num_ended + num_running:
            shared = draw.choice(stems)[: draw.randint(0, 512)]
            prompt = np.array(shared + [draw.randrange(10_000) for _ in range(draw.randint(100, 1024))], dtype=np.int32)
            params = SamplingParams(max_tokens=draw.randint(100, 1024), ignore_eos=True)
            scheduler.inbox.append(UserMsg(num_sent, prompt, params))
            num_sent += 1
        is_warm = scheduler.num_ended > 0
        start = time.perf_counter()
        scheduler.run_step()
        elapsed += (time.perf_counter() - start) * is_warm
        num_steps += is_warm
    scheduler.check_integrity()
    return {"mean_ms": round(elapsed * 1000 / num_steps, 4), "num_steps": num_steps}


def yardstick_ms() -> float:
    """Median milliseconds of a fixed loop: how fast this core is just now."""
    times = []
    for _ in range(21):
        start = time.perf_counter_ns()
        sum(i * i for i in range(20_000))
        times.append((time.perf_counter_ns() - start) / 1e6)
    return round(statistics.median(times), 3)


def profile(num_running: int, page_size: int) -> None:
    """Where the time of decode turns goes, as cProfile sees it."""
    profiler = cProfile.Profile()
    profiler.enable()
    measure_decode(num_running, page_size, 1000)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def print_table(measured: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    """One line per number of running requests and page size, the median over the runs of each run's figure."""
    print(f"{'':>24}{'yardstick':>16}{'decode median':>16}{'decode p99':>16}{'churn mean':>16}   ms per turn")
    for key, by_kind in measured.items():
        cells = (("decode", "yardstick_ms"), ("decode", "median_ms"), ("decode", "p99_ms"), ("churn", "mean_ms"))
        figures = [statistics.median(run[name] for run in by_kind[kind]) for kind, name in cells]
        target = TARGETS_MS.get(key.split()[0])
        print(f"{key:>24}" + "".join(f"{figure:16.3f}" for figure in figures) + (f"   target {target} ms" if target else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "host_time.json")
    parser.add_argument("--num-runs", type=int, default=3, help="how often all is measured")
    parser.add_argument("--num-steps", type=int, default=1000, help="decode turns in a run")
    parser.add_argument("--requests-per-lane", type=int, default=3, help="requests in a churn run, for each that runs at a time")
    parser.add_argument("--profile", action="store_true", help="print where decode turns spend their time, and write nothing")
    args = parser.parse_args()
    if args.profile:
        for num_running in (1, 256):
            profile(num_running, 64)
        return 0
    keys = {f"{num_running} running, page {size}": (num_running, size) for num_running in NUM_RUNNING for size in PAGE_SIZES}
    measured: dict[str, dict[str, list[dict[str, float]]]] = {key: {"decode": [], "churn": []} for key in keys}
    for _ in range(args.num_runs):
        for key, (num_running, size) in keys.items():
            measured[key]["decode"].append({"yardstick_ms": yardstick_ms(), **measure_decode(num_running, size, args.num_steps)})
            measured[key]["churn"].append(measure_churn(num_running, size, max(8, args.requests_per_lane * num_running)))
    print_table(measured)
    result = {
        "command": f"python benchmark/host_time.py {' '.join(sys.argv[1:])}".strip(),
        "versions": {"minisgl": version("minisgl"), "python": python_version(), "numpy": version("numpy")},
        "hardware": hardware(),
        "config": {name: str(value) for name, value in vars(args).items() if name not in ("out", "profile")},
        "targets_ms": TARGETS_MS,
        "measured": measured,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
