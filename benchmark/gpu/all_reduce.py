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

import torch
import torch.distributed as dist

from minisgl.bench.machine import hardware, versions
from minisgl.distributed import DistributedInfo
from minisgl.distributed.communicator import Communicator, SymmetricMemory, TorchDistributed, make_communicator
from minisgl.distributed.groups import join_groups

SIZES_KIB = (10, 64, 256, 640, 1024, 2048, 4096)
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
        tensor = torch.full((kib * 512,), number + 1, dtype=torch.bfloat16, device=device)
        for own in (tensor, tensor.float(), tensor.half()):
            assert bool((shared.all_reduce(own.clone()) == size * (size + 1) // 2).all()), own.dtype
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
        sys.exit(max(abs(child.wait()) for child in children))


if __name__ == "__main__":
    main()
