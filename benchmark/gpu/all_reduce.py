"""Sums over the GPUs of one machine: symmetric memory beside NCCL, in microseconds per call inside a CUDA graph.

    python benchmark/gpu/all_reduce.py [--ranks 2] [--out FILE]

Both sides are timed in turn, three times, on bfloat16; each figure is the median, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from minisgl.bench.machine import hardware, versions
from minisgl.distributed import DistributedInfo
from minisgl.distributed.communicator import SYMMETRIC_BYTES, Communicator, SymmetricMemory, TorchDistributed, make_communicator
from minisgl.distributed.groups import join_groups

MOST_S = 90.0
SIZES_KIB = (10, 64, 256, 640, 1024, 2048, 4096)
CHECKS = 20
CALLS, ROUNDS, REPEATS = 80, 3, 20
"""Calls in a graph, as many as a step of 40 layers makes; replays between two looks at the clock."""


def make_graph(comm: Communicator, tensor: torch.Tensor) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        comm.all_reduce(tensor.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(CALLS):
            comm.all_reduce(tensor)
    return graph


def check(shared: SymmetricMemory, number: int, size: int, count: int, dtype: torch.dtype) -> None:
    """Sums of whole numbers that differ by element, rank and call, one call behind the other; and who computes them."""
    base = torch.arange(count, device="cuda")
    parts = [[((base + call) * (rank + 1) % 31).to(dtype) for rank in range(size)] for call in range(CHECKS)]
    with mock.patch.object(TorchDistributed, "all_reduce", autospec=True, side_effect=TorchDistributed.all_reduce) as by_nccl:
        sums = [shared.all_reduce(of_ranks[number].clone()) for of_ranks in parts]
    for found, of_ranks in zip(sums, parts, strict=True):
        assert torch.equal(found, sum(of_ranks[1:], of_ranks[0])), dtype
    is_shared = dtype != torch.float16 and count * dtype.itemsize <= SYMMETRIC_BYTES[size]
    assert by_nccl.call_count == (0 if is_shared else CHECKS), (dtype, count)


def measure(graph: torch.cuda.CUDAGraph, group: Any) -> float:
    """Microseconds of a call, of the slowest rank."""
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(REPEATS):
        graph.replay()
    torch.cuda.synchronize()
    seconds = torch.tensor([time.perf_counter() - start], device="cuda")
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return float(seconds) / REPEATS / CALLS * 1e6


def rank(number: int, size: int, rendezvous: Path, out: Path | None) -> None:
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    groups = join_groups(DistributedInfo(number, size), rendezvous, device)
    assert groups.device is not None
    shared = make_communicator(DistributedInfo(number, size), groups, device)
    assert isinstance(shared, SymmetricMemory), "the GPUs share no memory"
    sides = {"nccl_us": TorchDistributed(groups.device, size), "symmetric_us": shared}
    rows = []
    for kib in SIZES_KIB:
        tensor = torch.zeros(kib * 512, dtype=torch.bfloat16, device=device)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            check(shared, number, size, kib * 512, dtype)
        graphs = {name: make_graph(comm, torch.zeros_like(tensor)) for name, comm in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                times[name].append(measure(graph, groups.device))
        rows.append({"kib": kib, **{name: statistics.median(values) for name, values in times.items()}})
        if number == 0:
            print(rows[-1], flush=True)
        del graphs
    if number == 0 and out is not None:
        report = {"ranks": size, "sums": rows, "versions": versions(), "hardware": hardware()}
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    torch.cuda.synchronize()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank, args.ranks, args.rendezvous, args.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--rendezvous", f"{folder}/meeting", "--rank"]
        children = [subprocess.Popen([*command, str(number)]) for number in range(args.ranks)]
        end = time.monotonic() + MOST_S
        try:
            while (codes := [child.poll() for child in children]) != [0] * args.ranks:
                if time.monotonic() > end or any(codes):
                    sys.exit(f"a rank has failed, or the ranks took too long: {codes}")
                time.sleep(0.1)
        finally:
            for child in children:
                child.kill()
                child.wait()


if __name__ == "__main__":
    main()
