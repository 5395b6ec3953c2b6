"""Speed of the attention kernels: decode in TB/s of K and V read, over a sweep of configurations, and prefill in TFLOP/s.

    python benchmark/gpu/attention.py [--out benchmark/results/h200-attention.json] [--quick | --decode-only]

Each workload is first compared with fp64 on a few rows; the largest error relative to the largest value is printed. Times are medians of
CUDA graph replays over pages in random order, the pool larger than the second-level cache where the workload is. `--decode-only` sweeps
the forms of the decode loop: all on the first workload, the fastest on the others, and a few of them on one row. `--interpret-smoke`
runs the same code on a CPU in Triton's interpreter with tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np
import torch

IS_SMOKE = "--interpret-smoke" in sys.argv
if IS_SMOKE:  # read when kernels are decorated, so before they are imported
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.tools.triton_interpreter import install

    install()

from minisgl.kernel.gpu.decode_attention import (  # noqa: E402
    CHUNK,
    DecodeConfig,
    DecodeWork,
    Partials,
    decode_attention,
    decode_config,
    make_partials,
    plan_decode,
    tile_descriptor,
)
from minisgl.kernel.gpu.prefill_attention import PrefillConfig, PrefillRows, plan_prefill, prefill_attention, prefill_config, shared_bytes  # noqa: E402

DEVICE = torch.device("cpu" if IS_SMOKE else "cuda")
DTYPE = torch.bfloat16
PAGE_SIZE, HEAD_DIM = 64, 128
HEADS = ((16, 8), (40, 8))
PEAK_TB_S, PEAK_TFLOP_S = 4.29, 790.0
"""Measured copy bandwidth and bf16 rate of an H200."""
NUM_CHECKED = 3

DECODE_SWEEP = {"block_n": (32, 64, 128), "num_stages": (2, 3, 5), "num_warps": (4, 8), "programs_per_sm": (2, 3, 4, 5)}
PREFILL_SWEEP = [PrefillConfig(*values) for values in product((64, 128), (64, 128), (2, 3), (4, 8), (1, 2))]
FORM_SWEEP = {
    "form": ("masked", "split", "tma", "swapped"),
    "block_n": (16, 32, 64),
    "num_stages": (2, 3, 4),
    "num_warps": (1, 2, 4),
    "programs_per_sm": (3, 4, 5, 6, 8, 12),
}
ONE_ROW_SWEEP = [
    DecodeConfig(block_n, 3, num_warps, 2, chunk, form)
    for chunk in (64, 128, 256)
    for form, block_n, num_warps in (
        ("masked", 64, 4),
        ("split", 64, 4),
        ("tma", 64, 4),
        ("swapped", 64, 4),
        ("split", 32, 4),
        ("swapped", 64, 2),
    )
]
SHARE_SWEEP = [DecodeConfig(16, 3, 1, programs, chunk, "split") for programs in (8, 10, 12, 14) for chunk in (256, 512, 768, 1024, 1536)]
"""How the work of many rows is cut and over how many programs it is spread."""
NUM_KEPT, NUM_LONGER = 15, 5
"""Configurations of the sweep of forms that go on to other workloads, and that are tried with longer chunks."""
MIN_BYTES_IN_FLIGHT = 64 * 1024
MAX_SHARED_BYTES, REGISTER_BYTES = 227 * 1024, 65_536 * 4


@dataclass(frozen=True)
class Rows:
    """Rows over shuffled pages; lengths in tokens."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: np.ndarray


def make_rows(lengths: np.ndarray, num_kv_heads: int) -> Rows:
    counts = -(-lengths // PAGE_SIZE)
    num_pages = int(counts.sum())
    k, v = (torch.randn((num_pages, num_kv_heads, PAGE_SIZE, HEAD_DIM), device=DEVICE, dtype=DTYPE) for _ in range(2))
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    table = np.zeros((len(lengths), int(counts.max())), dtype=np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        table[row, :count] = order[end - count : end]
    return Rows(k, v, torch.from_numpy(table).to(DEVICE), lengths)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(DEVICE)


def exact(q: torch.Tensor, rows: Rows, row: int) -> torch.Tensor:
    """fp64 attention of q [n, H, D], the last n tokens of a row."""
    length, group = int(rows.lengths[row]), q.shape[1] // rows.k.shape[1]
    pages = rows.table[row, : -(-length // PAGE_SIZE)].long()
    k, v = (t[pages].double().transpose(0, 1).flatten(1, 2)[:, :length] for t in (rows.k, rows.v))
    outs = []
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[head // group].T / HEAD_DIM**0.5
        limit = torch.arange(length - len(q), length, device=DEVICE)[:, None]
        scores = scores.masked_fill(torch.arange(length, device=DEVICE) > limit, float("-inf"))
        outs.append(scores.softmax(-1) @ v[head // group])
    return torch.stack(outs, dim=1)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest value; infinite where the output is not finite."""
    difference = float((out.double() - expected).abs().max() / expected.abs().max())
    return difference if math.isfinite(difference) else float("inf")


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median of 7 timings, each a graph of `repeats` calls, after warm-ups."""
    if IS_SMOKE:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def decode_configs(is_quick: bool) -> list[DecodeConfig]:
    """Those that can be resident: K and V of all stages but one, in shared memory, and enough registers."""
    if IS_SMOKE:
        return []
    configs = [DecodeConfig(*values) for values in product(*DECODE_SWEEP.values())]
    if is_quick:
        configs = [c for c in configs if c.num_warps == 4 and c.programs_per_sm in (2, 3, 4) and c.block_n < 128]
    size = 2 * HEAD_DIM * DTYPE.itemsize
    return [
        c
        for c in configs
        if max(1, c.num_stages - 1) * c.block_n * size * c.programs_per_sm <= MAX_SHARED_BYTES
        and 32 * c.num_warps * c.programs_per_sm * 64 * 4 <= REGISTER_BYTES
    ]


def form_configs() -> list[DecodeConfig]:
    """The sweep of forms without what cannot be resident, spills much, or has too few bytes in flight."""
    if IS_SMOKE:
        return [DecodeConfig(16, 2, 4, 4, form=form) for form in FORM_SWEEP["form"]]
    names = list(FORM_SWEEP)
    configs = [DecodeConfig(**dict(zip(names, values, strict=True))) for values in product(*FORM_SWEEP.values())]
    return [c for c in configs if is_plausible(c)]


def is_plausible(c: DecodeConfig) -> bool:
    """By what the compiler was seen to need: registers of a thread, and shared memory besides the buffers."""
    buffers = (c.num_stages - 1) * c.block_n * 2 * HEAD_DIM * DTYPE.itemsize
    is_swapped = c.form == "swapped"
    registers = {1: 160, 2: 128, 4: 92}[c.num_warps]
    if c.num_warps < 4:
        registers += (c.block_n - 16) * (1 if is_swapped else 2) // c.num_warps
    return (
        registers <= min(248, REGISTER_BYTES // 4 // (32 * c.num_warps * c.programs_per_sm))
        and (buffers + 5 * 1024) * c.programs_per_sm <= MAX_SHARED_BYTES
        and buffers * c.programs_per_sm >= MIN_BYTES_IN_FLIGHT
        and c.block_n >= (16 if c.num_warps == 1 else 32)
        and (c.form != "masked" or (c.num_warps == 4 and c.programs_per_sm >= 4))
        and not (is_swapped and (c.num_warps == 1 or c.block_n < 16 * c.num_warps))
    )


@cache
def tiles_of(pool: torch.Tensor, block_n: int) -> object:
    return tile_descriptor(pool, block_n)


def work_of(lengths: np.ndarray, chunk: int, heads: tuple[int, int]) -> tuple[DecodeWork, Partials]:
    first_partial, items = plan_decode(lengths, chunk)
    arrays = (np.arange(len(lengths)), lengths, first_partial, items, np.array([len(items)]))
    partials = make_partials(len(items), len(lengths), heads[1], heads[0] // heads[1], HEAD_DIM, DEVICE)
    return DecodeWork(*(on_device(array) for array in arrays)), partials


def bench_decode(name: str, lengths: np.ndarray, heads: tuple[int, int], configs: list[DecodeConfig], shown: int = 3) -> dict[str, object]:
    rows = make_rows(lengths, heads[1])
    q = torch.randn((len(lengths), heads[0], HEAD_DIM), device=DEVICE, dtype=DTYPE)
    best = decode_config(HEAD_DIM, DTYPE, len(lengths), PAGE_SIZE)
    configs = [best, *(config for config in configs if config != best)]
    works = {chunk: work_of(lengths, chunk, heads) for chunk in {config.chunk for config in configs}}
    num_bytes = int(lengths.sum()) * heads[1] * HEAD_DIM * DTYPE.itemsize * 2
    checked = np.argsort(lengths)[:: max(1, len(lengths) // NUM_CHECKED)]
    expected = torch.cat([exact(q[row : row + 1], rows, int(row)) for row in checked])
    results = []
    for config in configs:
        out = torch.full_like(q, float("nan"))
        pools = [tiles_of(pool, config.block_n) if config.has_descriptors else pool for pool in (rows.k, rows.v)]

        def call(out: torch.Tensor = out, pools: list[object] = pools, config: DecodeConfig = config) -> object:
            return decode_attention(q, *pools, rows.table, *works[config.chunk], out, config)

        result: dict[str, object] = {"config": asdict(config)}
        try:
            call()
            result["error"] = error(out[torch.from_numpy(checked.copy()).to(DEVICE)], expected)
            taken = seconds(call)
            result |= {"us": taken * 1e6, "tb_s": num_bytes / taken / 1e12, "share_of_copy": num_bytes / taken / 1e12 / PEAK_TB_S}
        except Exception as problem:  # a configuration that does not fit is a result too
            result["failed"] = f"{type(problem).__name__}: {str(problem)[:200]}"
        results.append(result)
    tiles_of.cache_clear()
    return report("decode", name, heads, results, shown)


def fastest(result: dict[str, object], number: int) -> list[DecodeConfig]:
    good = sorted((r for r in result["results"] if "us" in r), key=lambda r: r["us"])
    return [DecodeConfig(**r["config"]) for r in good[:number]]


def bench_forms(decode: dict[str, np.ndarray], num_processes: int) -> list[dict[str, object]]:
    """All forms on the first workload, the fastest on the others; of one row a small sweep with short chunks."""
    many = {name: lengths for name, lengths in decode.items() if len(lengths) > 1}
    (first, lengths), *others = many.items()
    one_row = [] if IS_SMOKE else ONE_ROW_SWEEP
    compile_decode([(HEADS[0], config) for config in form_configs() + one_row], num_processes)
    results = [bench_decode(first, lengths, HEADS[0], form_configs(), 6)]
    for length in () if IS_SMOKE else (256, 1024, 8192):
        results.append(bench_decode(f"1 x {length}", np.array([length], dtype=np.int32), HEADS[0], one_row, 6))
    kept = fastest(results[0], NUM_KEPT)
    kept += [replace(config, chunk=chunk) for config in kept[:NUM_LONGER] for chunk in (CHUNK // 2, 2 * CHUNK)]
    compile_decode([(heads, config) for heads in HEADS for config in kept if heads != HEADS[0] or config.chunk != CHUNK], num_processes)
    results.append(bench_decode(f"{first}, other chunks too", lengths, HEADS[0], kept, 6))
    results += [bench_decode(name, lengths, HEADS[0], kept + (one_row if len(lengths) < 100 else []), 6) for name, lengths in others]
    return results + [bench_decode(name, lengths, HEADS[1], kept, 6) for name, lengths in many.items()]


def bench_shares(num_processes: int) -> list[dict[str, object]]:
    """Chunks and programs for rows that are early and late in the offline workload, and for equal ones."""
    draw = np.random.default_rng(3).integers
    loads = {}
    for rows in (256, 224, 192, 160, 128, 96, 64, 48, 32, 24, 16):
        loads[f"{rows} early"] = (draw(100, 1025, rows) + draw(0, 600, rows)).astype(np.int32)
        loads[f"{rows} late"] = (draw(600, 1025, rows) + draw(0, 1000, rows)).astype(np.int32)
    loads |= {f"{rows} x {length}": np.full(rows, length, dtype=np.int32) for rows, length in ((64, 4000), (16, 8000), (256, 300))}
    compile_decode([(heads, config) for heads in HEADS for config in SHARE_SWEEP], num_processes)
    return [bench_decode(name, lengths, heads, SHARE_SWEEP, 3) for heads in HEADS for name, lengths in loads.items()]


def compile_decode(jobs: list[tuple[tuple[int, int], DecodeConfig]], num_processes: int) -> None:
    """Fill Triton's cache with the kernels of (heads, configuration) from several processes."""
    if IS_SMOKE:
        return
    start = time.perf_counter()
    children = []
    for index in range(num_processes):
        share = json.dumps([(heads, asdict(config)) for heads, config in jobs[index::num_processes]])
        children.append(subprocess.Popen([sys.executable, __file__, "--compile", share], stdout=subprocess.DEVNULL))
    for child in children:
        child.wait()
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)


def compile_share(share: str) -> None:
    """Call each configuration once, on a tiny row. One that does not compile shows its error in the parent."""
    lengths = np.array([2 * CHUNK + 9], dtype=np.int32)
    for heads, fields in json.loads(share):
        config = DecodeConfig(**fields)
        rows = make_rows(lengths, heads[1])
        q = torch.randn((1, heads[0], HEAD_DIM), device=DEVICE, dtype=DTYPE)
        try:
            decode_attention(q, rows.k, rows.v, rows.table, *work_of(lengths, config.chunk, heads), None, config)
        except Exception as problem:
            print(f"{config}: {problem}", file=sys.stderr)


def bench_prefill(name: str, lengths: np.ndarray, heads: tuple[int, int], configs: list[PrefillConfig]) -> dict[str, object]:
    rows = make_rows(lengths, heads[1])
    starts = np.cumsum(lengths) - lengths
    q = torch.randn((int(lengths.sum()), heads[0], HEAD_DIM), device=DEVICE, dtype=DTYPE)
    on_rows = PrefillRows(*(on_device(array) for array in (np.arange(len(lengths)), 0 * lengths, lengths, starts)))
    flops = 2 * heads[0] * HEAD_DIM * int((lengths.astype(np.int64) * (lengths + 1)).sum())
    last = slice(max(0, int(lengths[0]) - 200), int(lengths[0]))
    expected = exact(q[last], rows, 0)
    results = []
    for config in configs:
        tiles = on_device(plan_prefill(0 * lengths, lengths, config.block_m))
        out = torch.full_like(q, float("nan"))

        def call(out: torch.Tensor = out, tiles: torch.Tensor = tiles, config: PrefillConfig = config) -> object:
            return prefill_attention(q, rows.k, rows.v, rows.table, on_rows, tiles, out, config)

        result: dict[str, object] = {"config": asdict(config)}
        try:
            call()
            result["error"] = error(out[last], expected)
            taken = seconds(call, repeats=3)
            result |= {"us": taken * 1e6, "tflop_s": flops / taken / 1e12, "share_of_peak": flops / taken / 1e12 / PEAK_TFLOP_S}
        except Exception as problem:  # a configuration that does not fit is a result too
            result["failed"] = f"{type(problem).__name__}: {str(problem)[:200]}"
        results.append(result)
    return report("prefill", name, heads, results)


def report(kind: str, name: str, heads: tuple[int, int], results: list[dict[str, object]], num_shown: int = 3) -> dict[str, object]:
    """Print the configuration in use and the fastest; all results go to the file."""
    good = sorted((r for r in results if "us" in r), key=lambda r: r["us"])
    worst = max((r["error"] for r in results if "error" in r), default=None)
    print(f"{kind} {name}, {heads[0]} over {heads[1]} heads: {len(good)} of {len(results)} ran, largest error {worst}", flush=True)
    for label, result in [*(("in use", r) for r in results[:1]), *(("fastest", r) for r in good[:num_shown])]:
        figures = {key: value for key, value in result.items() if key != "config"}
        shown = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items())
        print(f"  {label:<8} {' '.join(f'{key}={value}' for key, value in result['config'].items())}: {shown}", flush=True)
    return {"kind": kind, "name": name, "heads": heads, "results": results}


def compile_all(num_processes: int, is_quick: bool) -> None:
    """Fill Triton's cache from several processes, each with a share of the configurations and tiny rows."""
    flags = ["--quick"] if is_quick else []
    command = [sys.executable, __file__, *flags, "--share"]
    children = [subprocess.Popen([*command, f"{i}/{num_processes}"], stdout=subprocess.DEVNULL) for i in range(num_processes)]
    for child in children:
        child.wait()


def workloads() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tokens of each row: of decode, of prefill."""
    if IS_SMOKE:
        return {"3 rows": np.array([300, 5, 64], dtype=np.int32)}, {"2 rows": np.array([70, 9], dtype=np.int32)}
    mixed = np.random.default_rng(1).integers(100, 2049, 256).astype(np.int32)
    ones = {f"1 x {n}": np.array([n], dtype=np.int32) for n in (128, 1024, 8192, 32_768)}
    many = {f"{n} x 900": np.full(n, 900, dtype=np.int32) for n in (256, 64, 24)}
    decode = {"256 x 900": many.pop("256 x 900"), "256 x 100..2048": mixed, **many, **ones}
    return decode, {"1 x 8192": np.array([8192], dtype=np.int32), "16 x 512": np.full(16, 512, dtype=np.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all results to this JSON file")
    parser.add_argument("--quick", action="store_true", help="sweep fewer configurations")
    parser.add_argument("--interpret-smoke", action="store_true", help="tiny shapes in Triton's interpreter, on a CPU")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1), help="compile the sweep with so many processes")
    parser.add_argument("--decode-only", action="store_true", help="sweep the forms of the decode loop, nothing else")
    parser.add_argument("--shares", action="store_true", help="sweep how the work of many rows is cut and spread, nothing else")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        return compile_share(args.compile)
    torch.manual_seed(0)
    decode, prefill = workloads()
    best = prefill_config(HEAD_DIM, DTYPE, shared_bytes(DEVICE))
    prefill_configs = [best] if IS_SMOKE else [best, *(c for c in PREFILL_SWEEP if c != best)]
    if args.quick:
        prefill_configs = [best, replace(best, num_stages=2), replace(best, num_stages=2, programs_per_sm=2)]
    all_decode = decode_configs(args.quick)
    if args.share:
        index, count = map(int, args.share.split("/"))
        all_decode, prefill_configs = all_decode[index::count], prefill_configs[index::count]
        decode, prefill = ({"tiny": np.array([300], dtype=np.int32)} for _ in range(2))
    elif not IS_SMOKE and not args.decode_only and not args.shares:
        start = time.perf_counter()
        compile_all(args.processes, args.quick)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    results = bench_forms(decode, args.processes) if args.decode_only else []
    results += bench_shares(args.processes) if args.shares else []
    for heads in () if args.decode_only or args.shares else HEADS:
        results += [bench_decode(name, lengths, heads, all_decode) for name, lengths in decode.items()]
        results += [bench_prefill(name, lengths, heads, prefill_configs) for name, lengths in prefill.items()]
    if args.out:
        device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "interpreter"
        versions = {name: version(name) for name in ("torch", "triton", "numpy")}
        facts = {"device": device, "versions": versions, "page_size": PAGE_SIZE, "head_dim": HEAD_DIM, "chunk": CHUNK}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
