"""Host time of the radix prefix cache: match and insert of 4,096 tokens, and eviction of one leaf among 100,000 nodes.

    python benchmark/prefix_cache.py [--out benchmark/results/prefix_cache.json]

Medians, in microseconds. Cold: a new prompt is matched and inserted. Warm: the same prompt is matched and inserted again. Branch: a
prompt that leaves a cached one in its middle, which splits a node. Chunked: the prompt came in chunks of 128 tokens, so that its path
has 32 nodes. Nothing here needs torch or a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

from minisgl.core import Int32Array
from minisgl.kvcache import BasePrefixCache, make_prefix_cache

NUM_TOKENS = 4096
NUM_NODES = 100_000
CHUNK = 128
PAGE_SIZES = (1, 16, 64)
TARGETS_US = {"match_and_insert_4096_tokens": 300.0, "evict_one_leaf_of_100000_nodes": 20.0}


def elapsed_us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def match_and_insert(cache: BasePrefixCache, tokens: Int32Array, pages: Int32Array) -> None:
    cache.match(tokens[:-1])
    cache.insert(tokens, pages)


def measure_prompts(page_size: int, num_prompts: int) -> dict[str, float]:
    """Microseconds of match plus insert of 4,096 tokens, by kind of prompt."""
    rng = np.random.default_rng(0)
    cache = make_prefix_cache("radix", page_size)
    num_pages = NUM_TOKENS // page_size
    times: dict[str, list[float]] = {"cold": [], "warm": [], "branch": [], "chunked": []}
    next_page = 0

    def new_prompt() -> tuple[Int32Array, Int32Array]:
        nonlocal next_page
        next_page += num_pages
        return rng.integers(0, 150_000, NUM_TOKENS).astype(np.int32), np.arange(next_page - num_pages, next_page, dtype=np.int32)

    for _ in range(num_prompts):
        tokens, pages = new_prompt()
        times["cold"].append(elapsed_us(lambda t=tokens, p=pages: match_and_insert(cache, t, p)))
        times["warm"].append(elapsed_us(lambda t=tokens, p=pages: match_and_insert(cache, t, p)))
        branch, branch_pages = new_prompt()
        branch[: NUM_TOKENS // 2] = tokens[: NUM_TOKENS // 2]
        branch_pages[: num_pages // 2] = pages[: num_pages // 2]
        times["branch"].append(elapsed_us(lambda t=branch, p=branch_pages: match_and_insert(cache, t, p)))
        chunked, chunked_pages = new_prompt()
        for end in range(CHUNK, NUM_TOKENS + 1, CHUNK):
            cache.insert(chunked[:end], chunked_pages[: end // page_size])
        times["chunked"].append(elapsed_us(lambda t=chunked, p=chunked_pages: match_and_insert(cache, t, p)))
    cache.check_integrity()
    return {f"{kind}_us": round(statistics.median(values), 1) for kind, values in times.items()}


def measure_eviction(page_size: int, num_evictions: int) -> dict[str, float]:
    """Microseconds to evict one leaf of a tree of 100,000 nodes, all of them used once more in a random order before."""
    rng = np.random.default_rng(0)
    cache = make_prefix_cache("radix", page_size)
    prompts = []
    for stem in range(NUM_NODES // 5):  # one stem of a page and four leaves of a page each
        for leaf in range(4):
            tokens = np.full(2 * page_size, leaf, dtype=np.int32)
            tokens[:page_size] = stem
            first = stem * 5
            cache.insert(tokens, np.array([first, first + 1 + leaf], dtype=np.int32))
            prompts.append(tokens)
    for index in rng.permutation(len(prompts)):
        cache.match(prompts[index])
    assert cache.num_evictable_pages == NUM_NODES, "each node holds one page"
    times = [elapsed_us(lambda: cache.evict(1)) for _ in range(num_evictions)]
    figures = {
        "median_us": statistics.median(times),
        "p99_us": sorted(times)[num_evictions * 99 // 100],
        "integrity_walk_ms": elapsed_us(cache.check_integrity) / 1000,
    }
    return {name: round(figure, 1) for name, figure in figures.items()}


def hardware() -> dict[str, str]:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": models[0] if models else platform.processor(), "num_cores": str(os.cpu_count()), "platform": platform.platform()}


def print_table(measured: dict[str, dict[str, list[dict[str, float]]]], targets_us: dict[str, float]) -> None:
    """One line per page size, the median over the runs of each run's figure."""
    for what, by_size in measured.items():
        columns = list(next(iter(by_size.values()))[0])
        sys.stdout.write(f"{what}, target {targets_us[what]:.0f} us\n  page size" + "".join(f"{name:>20}" for name in columns) + "\n")
        for size, runs in by_size.items():
            figures = [statistics.median(run[name] for run in runs) for name in columns]
            sys.stdout.write(f"{size:>11}" + "".join(f"{figure:20.1f}" for figure in figures) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "prefix_cache.json")
    parser.add_argument("--num-runs", type=int, default=3, help="how often all is measured")
    parser.add_argument("--num-prompts", type=int, default=100, help="prompts of each kind in a run; the figure is their median")
    parser.add_argument("--num-evictions", type=int, default=2000, help="evictions of one leaf in a run")
    args = parser.parse_args()
    measured: dict[str, dict[str, list[dict[str, float]]]] = {what: {str(size): [] for size in PAGE_SIZES} for what in TARGETS_US}
    for _ in range(args.num_runs):
        for size in PAGE_SIZES:
            measured["match_and_insert_4096_tokens"][str(size)].append(measure_prompts(size, args.num_prompts))
            measured["evict_one_leaf_of_100000_nodes"][str(size)].append(measure_eviction(size, args.num_evictions))
    print_table(measured, TARGETS_US)
    result = {
        "command": f"python benchmark/prefix_cache.py {' '.join(sys.argv[1:])}".strip(),
        "versions": {"minisgl": version("minisgl"), "python": platform.python_version(), "numpy": version("numpy")},
        "hardware": hardware(),
        "config": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "targets_us": TARGETS_US,
        "measured": measured,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
