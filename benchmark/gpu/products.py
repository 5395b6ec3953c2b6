"""Search among cuBLASLt's algorithms for matrix products, beside the library's own choice; writes the table that minisgl takes.

    python benchmark/gpu/products.py [--seconds 0.6] [--only NAME ...] [--out FILE] [--table FILE]

For each matrix and number of rows: first what the library itself proposes, then its neighbours, one attribute changed, as long as the time
for the cell lasts. Times are of one product in a CUDA graph of several, each with a matrix of its own that no cache holds. The table takes
what is at least 2.5 % and 0.3 us faster than torch's product; put it in place of minisgl/kernel/products.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from linear import BYTES_IN_TURN, MATRICES, time_us  # the program beside this one

from minisgl.kernel.products import ATTRIBUTES, MAX_WORKSPACE, Algorithm, Product, Result, describe, library

Name = tuple[int, ...]
LEAST_RATIO, LEAST_US = 1.025, 0.3
LARGEST_ERROR = 2e-2
HEADS = {"14B head": (151936, 5120), "0.6B head": (151936, 1024)}
"""outputs, inputs"""
ROWS = (8, *range(16, 257, 16), 512, 2048, 8192)
HEAD_ROWS = (64, 128, 192, 256)
MAX_ALGORITHMS = 100
TILES, OPTIONS, STAGES = 6, 7, 13
"""The library's numbers of what an algorithm can do."""


def name_of(algorithm: Algorithm) -> Name:
    values = []
    for number, kind in enumerate(ATTRIBUTES):
        value, written = kind(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(kind))
        library()("MatmulAlgoConfigGetAttribute", ctypes.byref(algorithm), number, ctypes.byref(value), size, ctypes.byref(written))
        values.append(value.value)
    return tuple(values)


def proposed(sizes: tuple[int, int, int]) -> list[Algorithm]:
    """What the library proposes, the best first."""
    operation, (weight, x, out) = describe(*sizes)
    preference, most = ctypes.c_void_p(), ctypes.c_uint64(MAX_WORKSPACE)
    library()("MatmulPreferenceCreate", ctypes.byref(preference))
    library()("MatmulPreferenceSetAttribute", preference, 1, ctypes.byref(most), ctypes.c_size_t(8))
    results, count = (Result * MAX_ALGORITHMS)(), ctypes.c_int()
    asked = (operation, weight, x, out, out, preference, MAX_ALGORITHMS, results, ctypes.byref(count))
    library()("MatmulAlgoGetHeuristic", library().handle, *asked)
    return [result.algorithm for result in results[: count.value] if result.status == 0]


def abilities(algorithm: Algorithm, what: int, room: int = 256) -> list[int]:
    """Numbers that the library lists; none where it has no such list."""
    values, written = (ctypes.c_uint32 * room)(), ctypes.c_size_t()
    size = ctypes.c_size_t(4 * (1 if what == OPTIONS else room))
    try:
        library()("MatmulAlgoCapGetAttribute", ctypes.byref(algorithm), what, values, size, ctypes.byref(written))
    except RuntimeError:
        return []
    return list(values[: written.value // 4])


def neighbours(name: Name, algorithm: Algorithm) -> Iterator[Name]:
    """Names with one attribute changed, possible or not: tile, parts of K, order of the tiles, option, stages, cluster."""
    values = {
        1: abilities(algorithm, TILES),
        2: [1, 2, 3, 4, 5, 6, 8],
        4: [0, 1],
        5: range(min(max(abilities(algorithm, OPTIONS), default=0), 40) + 1),
        6: abilities(algorithm, STAGES),
        8: range(52),
    }
    for place, choices in values.items():
        for value in choices:
            changed = [*name[:place], value, *name[place + 1 :]]
            if place == 2:
                changed[3] = 0 if value == 1 else changed[3] or 2  # parts are added in fp32
            yield tuple(changed)


def time_of(name: Name, x: torch.Tensor, weights: list[torch.Tensor], replays: int) -> float | None:
    """Microseconds of x times one of the weights by that algorithm; None if it refuses, or its result is not torch's."""
    try:
        product = Product(len(x), *weights[0].shape, name)
        out = product(x, weights[0])
    except RuntimeError:
        return None
    expected = F.linear(x, weights[0])
    is_right = float((out - expected).abs().max()) < LARGEST_ERROR * float(expected.abs().max())
    return time_us(partial(product, x), weights, replays) if is_right else None


def write_table(file: Path, algorithms: Iterable[Sequence[int]]) -> None:
    """As minisgl takes it, a line for each product: its sizes and its algorithm's attributes."""
    lines = ",\n".join(f"  {json.dumps(list(entry))}" for entry in algorithms)
    head = f' "device": {json.dumps(torch.cuda.get_device_name())},\n "cublaslt": {library().version},\n'
    file.write_text(f'{{\n{head} "algorithms": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def search(sizes: tuple[int, int, int], weights: list[torch.Tensor], seconds: float) -> dict[str, Any]:
    x = torch.randn(sizes[0], sizes[2], device="cuda", dtype=torch.bfloat16)
    torch_us = time_us(lambda weight: F.linear(x, weight), weights, 9)
    tried: set[Name] = set()
    found: list[tuple[float, Name]] = []

    def attempt(name: Name) -> None:
        if name in tried:
            return
        tried.add(name)
        if (us := time_of(name, x, weights, 3)) is not None:
            found.append((us, name))
            found.sort()

    start = time.monotonic()
    algorithms = {name_of(algorithm): algorithm for algorithm in proposed(sizes)}
    for name in algorithms:
        attempt(name)
    done: set[Name] = set()
    while time.monotonic() < start + seconds and (todo := [name for _, name in found[:4] if name not in done]):
        done.add(todo[0])
        algorithm = next(a for name, a in algorithms.items() if name[0] == todo[0][0])
        for name in neighbours(todo[0], algorithm):
            if time.monotonic() > start + seconds:
                break
            attempt(name)
    again = sorted((time_us(partial(Product(*sizes, name), x), weights, 9), name) for _, name in found[:5])
    torch_us = min(torch_us, time_us(lambda weight: F.linear(x, weight), weights, 9))
    return {"sizes": sizes, "torch_us": torch_us, "tried": len(found), "best": again}


def main() -> None:
    matrices = {**MATRICES, **HEADS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.6, help="of search for each cell")
    parser.add_argument("--only", nargs="*", default=list(matrices), choices=list(matrices), help="matrices", metavar="NAME")
    parser.add_argument("--out", type=Path, help="JSON file of all cells")
    parser.add_argument("--table", type=Path, help="table to write")
    args = parser.parse_args()
    cells = []
    for label in args.only:
        outputs, inputs = matrices[label]
        count = int(BYTES_IN_TURN // (2 * outputs * inputs)) + 2
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        for rows in HEAD_ROWS if label in HEADS else ROWS:
            cell = {"matrix": label, **search((rows, outputs, inputs), weights, args.seconds)}
            cells.append(cell)
            print(f"{label}, {rows} rows: torch {cell['torch_us']:.1f} us, best of {cell['tried']}: {cell['best'][:1]}", flush=True)
        del weights
    faster = [
        (c, best) for c in cells for best in c["best"][:1] if c["torch_us"] / best[0] >= LEAST_RATIO and c["torch_us"] - best[0] >= LEAST_US
    ]
    if args.out:
        report = {"device": torch.cuda.get_device_name(), "cublaslt": library().version, "cells": cells}
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.table:
        write_table(args.table, [[*cell["sizes"], *name] for cell, (_, name) in faster])


if __name__ == "__main__":
    main()
