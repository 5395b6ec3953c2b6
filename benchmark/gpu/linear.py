"""Products of few rows on a GPU: our kernel in several shapes beside the library's, with weights that no cache holds.

    python benchmark/gpu/linear.py [--out FILE]

Prints microseconds of one product inside a CUDA graph of many, each with a matrix of its own, and the share of the copy bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from minisgl.kernel.gpu.linear import LinearConfig, linear, linear_config, norm_linear

COPY_BANDWIDTH = 4.29e12
"""bytes per second, measured with a device-to-device copy, reads and writes counted"""
BYTES_IN_TURN = 400e6
MATRICES = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate and up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "14B qkv": (7168, 5120),
    "14B o": (5120, 5120),
    "14B gate and up": (34816, 5120),
    "14B down": (5120, 17408),
}
"""outputs, inputs"""


def time_us(run: Callable[[torch.Tensor], Any], weights: list[torch.Tensor], replays: int = 5) -> float:
    """Microseconds of one product; the median of so many replays."""
    run(weights[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(weights))
    return sorted(times)[replays // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4], help="rows of our kernel")
    parser.add_argument("--library-rows", type=int, nargs="*", default=[8, 32, 64, 128, 256], help="further rows of the library's")
    args = parser.parse_args()
    report = []
    for name, (num_outputs, num_inputs) in MATRICES.items():
        size = 2 * num_outputs * num_inputs
        weights = [
            torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(int(BYTES_IN_TURN // size) + 2)
        ]
        for rows in args.rows + args.library_rows:
            x = torch.randn(rows, num_inputs, device="cuda", dtype=torch.bfloat16)
            entry: dict[str, Any] = {"matrix": name, "rows": rows, "floor_us": size / COPY_BANDWIDTH * 1e6}
            entry["library_us"] = time_us(lambda weight, x=x: F.linear(x, weight), weights)
            if rows in args.rows:
                exact = F.linear(x.double(), weights[0].double())
                entry["error"] = float((linear(x, weights[0]).double() - exact).abs().max() / exact.abs().max())
                found = {}
                for block_n, block_k, num_warps in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048), (2, 4, 8)):
                    elements = rows * block_n * block_k
                    if not 4 * 32 * num_warps <= elements <= 128 * 32 * num_warps or block_k > 2 * num_inputs:
                        continue
                    config = LinearConfig(block_n, block_k, num_warps)
                    found[f"{block_n}x{block_k}w{num_warps}"] = time_us(
                        lambda weight, x=x, config=config: linear(x, weight, config=config), weights
                    )
                best = sorted(found.items(), key=lambda item: item[1])[:3]
                entry["best"] = best
                default = linear_config(num_inputs, rows)
                entry["default"] = [
                    f"{default.block_n}x{default.block_k}w{default.num_warps}",
                    time_us(lambda weight, x=x: linear(x, weight), weights),
                ]
                norm = (torch.ones(num_inputs, device="cuda", dtype=torch.bfloat16), 1e-6)
                entry["with_norm_us"] = time_us(lambda weight, x=x, norm=norm: norm_linear(x, x, norm, weight), weights)
            report.append(entry)
            print(json.dumps({key: (round(value, 4) if isinstance(value, float) else value) for key, value in entry.items()}), flush=True)
        del weights
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
