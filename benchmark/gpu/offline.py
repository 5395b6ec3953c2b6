"""Offline speed on a GPU, in one process per model: the workload of 256 requests and one request alone, with random weights.

    python benchmark/gpu/offline.py --model DIR [--out FILE] [--runs 3] [--profile N] [setting=value ...]

A setting is a field of SchedulerConfig, for ablations: overlap=false, cuda_graph_max_bs=0, attention_backend="torch". One request alone
has 128 tokens of prompt and 256 of output. `--profile N` traces N decode steps of each kind and prints where the device's time goes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minisgl.bench.machine import hardware, versions
from minisgl.bench.offline import Options, make_workload
from minisgl.core import SamplingParams
from minisgl.llm import LLM

ALONE_IN, ALONE_OUT = 128, 256
CLASSES = {
    "attention": ("decode_kernel", "prefill_kernel", "flash", "fmha"),
    "matrix products": ("linear_kernel", "gemm", "nvjet", "cutlass", "gemv", "splitk", "dot_kernel", "matmul"),
    "norm": ("norm",),
    "rotation and K/V": ("rope",),
    "SiLU": ("silu",),
    "sampling": ("sample",),
}


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], num_runs: int) -> list[float]:
    """Output tokens per second of each run."""
    rates = []
    for number in range(num_runs):
        llm.scheduler.reset_prefix_cache()
        start = time.perf_counter()
        results = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - start
        num_tokens = sum(len(result.token_ids) for result in results)
        assert num_tokens == sum(own.max_tokens or 0 for own in params), [r.error for r in results if r.error][:3]
        rates.append(num_tokens / seconds)
        print(f"  run {number + 1}: {seconds:.3f} s, {rates[-1]:,.0f} tok/s", flush=True)
    return rates


class StepClock:
    """Notes each step between `start` and `stop`: what it computed, when it was launched, when its tokens were there."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.scheduler.engine
        self._submit = self._engine.submit
        self.steps: list[dict[str, Any]] = []

    def start(self) -> None:
        """Steps are noted from now on."""
        self.steps = []
        self._engine.submit = self._noted  # type: ignore[method-assign]

    def stop(self) -> None:
        """No more."""
        del self._engine.submit

    def _noted(self, batch: Any) -> Any:
        begin = time.perf_counter()
        step = self._submit(batch)
        launched = time.perf_counter()
        note: dict[str, Any] = {"rows": batch.num_rows, "tokens": batch.num_tokens, "is_decode": bool(batch.is_decode)}
        note |= {"seen": int((batch.cached_lens + batch.extend_lens).sum()), "begin": begin, "launched": launched}
        self.steps.append(note)
        return _NotedStep(step, note)


class _NotedStep:
    def __init__(self, step: Any, note: dict[str, Any]) -> None:
        self._step, self._note = step, note

    def read(self) -> Any:
        self._note["asked"] = time.perf_counter()
        tokens = self._step.read()
        self._note["read"] = time.perf_counter()
        return tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def step_table(steps: list[dict[str, Any]], num_bins: int = 16) -> list[dict[str, Any]]:
    """Milliseconds of steps by kind and number of rows: the time between the arrivals of two results, and what the host did in it."""
    groups: dict[tuple[str, int], list[tuple[float, ...]]] = defaultdict(list)
    width = max(step["rows"] for step in steps) / num_bins
    for before, step in itertools.pairwise(steps):
        key = ("decode" if step["is_decode"] else "mixed", -int(-step["rows"] // width))
        whole, launch = step["read"] - before["read"], step["launched"] - step["begin"]
        groups[key].append((whole * 1000, launch * 1000, (step["read"] - step["asked"]) * 1000, step["tokens"], step["seen"]))
    table = []
    for (kind, number), times in sorted(groups.items()):
        whole, launch, wait, tokens, seen = (statistics.mean(column) for column in zip(*times, strict=True))
        row = {"kind": kind, "rows_up_to": round(number * width), "steps": len(times), "ms": whole, "launch_ms": launch, "wait_ms": wait}
        table.append({**row, "tokens": tokens, "seen": seen, "seconds": whole * len(times) / 1000})
        print(
            "   ", " ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in table[-1].items())
        )
    return table


def trace(llm: LLM, num_rows: int, context: int, num_steps: int) -> dict[str, Any]:
    """Device time per step and class of kernel, of decode steps of `num_rows` rows with some `context` tokens each."""
    draw = random.Random(1).randint
    prompts = [[draw(0, 9999) for _ in range(context)] for _ in range(num_rows)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_steps + 120)
    counts = {"steps": 0}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU])
    engine = llm.scheduler.engine
    submit = engine.submit

    def counted(batch: Any) -> Any:
        if batch.is_decode and batch.num_rows == num_rows:
            counts["steps"] += 1
            if counts["steps"] == 20:
                torch.cuda.synchronize()
                profiler.start()
                counts["start"] = time.perf_counter_ns()
            if counts["steps"] == 20 + num_steps:
                torch.cuda.synchronize()
                counts["end"] = time.perf_counter_ns()
                profiler.stop()
        return submit(batch)

    engine.submit = counted  # type: ignore[method-assign]
    try:
        llm.scheduler.reset_prefix_cache()
        llm.generate(prompts, params, progress=False)
    finally:
        del engine.submit
    wall = (counts["end"] - counts["start"]) / num_steps / 1000
    return summary(f"{num_rows} rows x {context}", profiler, num_steps, wall)


def trace_prefill(llm: LLM, num_rows: int, length: int) -> dict[str, Any]:
    """The same of one step that computes whole prompts."""
    draw = random.Random(1).randint
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1)
    walls = []
    for number in range(3):
        prompts = [[draw(0, 9999) for _ in range(length)] for _ in range(num_rows)]
        llm.scheduler.reset_prefix_cache()
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        if number == 2:
            profiler.start()
        start = time.perf_counter_ns()
        llm.generate(prompts, params, progress=False)
        walls.append((time.perf_counter_ns() - start) / 1000)
    profiler.stop()
    return summary(f"prefill of {num_rows} x {length}", profiler, 1, walls[1])


def summary(title: str, profiler: Any, num_steps: int, wall: float) -> dict[str, Any]:
    """Print and return microseconds of device time per step, by class and by kernel."""
    by_class: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].append(event.device_time)
    for name, times in kernels.items():
        lower = name.lower()
        kind = next((kind for kind, parts in CLASSES.items() if any(part in lower for part in parts)), "other")
        by_class[kind] += sum(times) / num_steps
    print(f"  {title}: {wall:,.0f} us a step, {sum(by_class.values()):,.0f} in kernels")
    for kind, us in sorted(by_class.items(), key=lambda item: -item[1]):
        print(f"    {kind:<18} {us:8,.1f} us")
    top = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:16]
    listed = [{"name": name[:90], "us_per_step": sum(t) / num_steps, "per_step": len(t) / num_steps} for name, t in top]
    for entry in listed:
        print(f"      {entry['us_per_step']:8.1f} us  {entry['per_step']:6.1f} x  {entry['name']}")
    return {"title": title, "wall_us": wall, "us": dict(by_class), "kernels": listed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind")
    parser.add_argument("--profile", type=int, default=0, help="decode steps to trace; 0: none")
    parser.add_argument("--num-requests", type=int, default=256, help="requests of the workload")
    parser.add_argument("settings", nargs="*", help="fields of SchedulerConfig, name=value in JSON")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("minisgl.engine.graphs").setLevel(logging.DEBUG)  # what a capture costs
    settings = {name: json.loads(value) for name, value in (text.split("=", 1) for text in args.settings)}
    start = time.perf_counter()
    llm = LLM(args.model, use_dummy_weight=True, **settings)
    plain = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=8)
    loaded = time.perf_counter() - start
    clock = StepClock(llm)
    llm.generate([[1] * 32], plain, progress=False)
    ready = time.perf_counter() - start
    print(f"{Path(args.model).name} {settings}: loaded in {loaded:.1f} s, first answer after {ready:.1f} s", flush=True)
    workload = make_workload(Options(num_requests=args.num_requests))
    llm.generate([workload.prompts[0]] * 2, plain, progress=False)
    many = [replace(plain, max_tokens=length) for length in workload.output_lens]
    draw = random.Random(2).randint
    alone = [[draw(0, 9999) for _ in range(ALONE_IN)]]
    rates = {
        "one request": run(llm, alone, [replace(plain, max_tokens=ALONE_OUT)], args.runs + 1)[1:],
        f"{args.num_requests} requests": run(llm, workload.prompts, many, args.runs),
    }
    for name, values in rates.items():
        print(f"{name}: median {statistics.median(values):,.1f} tok/s", flush=True)
    clock.start()
    print("steps of one more run:", flush=True)
    run(llm, workload.prompts, many, 1)
    clock.stop()
    steps = step_table(clock.steps)
    report = {
        "model": Path(args.model).name,
        "settings": settings,
        "loaded_s": loaded,
        "first_answer_s": ready,
        "output_tokens_per_s": {name: {"median": statistics.median(values), "runs": values} for name, values in rates.items()},
        "steps": steps,
        "versions": versions(),
        "hardware": hardware(),
    }
    if args.profile:
        report["profile"] = [
            trace(llm, 1, 256, args.profile),
            trace(llm, args.num_requests, 900, args.profile),
            trace_prefill(llm, 16, 500),
        ]
    llm.close()
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
