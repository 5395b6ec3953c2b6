"""Offline speed on a GPU, in one process per model: the workload of 256 requests and one request alone, with random weights.

    python benchmark/gpu/offline.py --model DIR [--out FILE] [--runs 3] [--profile N] [setting=value ...]

A setting is a field of SchedulerConfig, for ablations: overlap=false, cuda_graph_max_bs=0, attention_backend="torch". One request alone
has 128 tokens of prompt and 256 of output. `--profile N` traces N decode steps and a prefill step of one request and of
many, all of equal length, and prints where the device's time goes.
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

from minisgl.bench.machine import hardware, versions
from minisgl.bench.offline import Options, make_workload
from minisgl.bench.profile import WatchedStep, profile, run_watched
from minisgl.core import SamplingParams
from minisgl.llm import LLM

ALONE_IN, ALONE_OUT = 128, 256


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


def step_table(steps: list[WatchedStep], num_bins: int = 16) -> list[dict[str, Any]]:
    """Milliseconds of steps by kind and number of rows: the time between the arrivals of two results, and what the host did in it."""
    groups: dict[tuple[str, int], list[tuple[float, ...]]] = defaultdict(list)
    width = max(step.batch.num_rows for step in steps) / num_bins
    for before, step in itertools.pairwise(steps):
        batch = step.batch
        key = ("decode" if batch.is_decode else "mixed", -int(-batch.num_rows // width))
        whole, launch, wait = step.arrived - before.arrived, step.launched - step.submitted, step.arrived - step.asked
        seen = int((batch.cached_lens + batch.extend_lens).sum())
        groups[key].append((whole * 1000, launch * 1000, wait * 1000, batch.num_tokens, seen))
    table = []
    for (kind, number), times in sorted(groups.items()):
        whole, launch, wait, tokens, seen = (statistics.mean(column) for column in zip(*times, strict=True))
        row = {"kind": kind, "rows_up_to": round(number * width), "steps": len(times), "ms": whole, "launch_ms": launch, "wait_ms": wait}
        table.append({**row, "tokens": tokens, "seen": seen, "seconds": whole * len(times) / 1000})
        print(
            "   ", " ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in table[-1].items())
        )
    return table


def trace(llm: LLM, num_requests: int, num_tokens: int, num_steps: int) -> dict[str, Any]:
    """Device time per step and class of kernel, of requests with so many tokens of prompt each that decode together."""
    draw = random.Random(1).randint
    prompts = [[draw(0, 9999) for _ in range(num_tokens)] for _ in range(num_requests)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_steps + 120)
    return profile(llm, (prompts, [params] * num_requests), num_steps, None, print)


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
    print("steps of one more run:", flush=True)
    steps = step_table(run_watched(llm, (workload.prompts, many)))
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
        report["profile"] = [trace(llm, 1, 256, args.profile), trace(llm, args.num_requests, 900, args.profile)]
    llm.close()
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
