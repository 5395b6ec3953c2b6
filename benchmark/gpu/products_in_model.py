"""Choose among cuBLASLt's algorithms by the time of whole steps; writes the table that minisgl takes.

    python benchmark/gpu/products_in_model.py --model DIR --candidates FILE [--rows N ...] [--prompts N] [--out FILE] [--table FILE]

`products.py` times a product alone. In a model it runs hotter, beside kernels that read memory, and a card at its power limit prefers other
algorithms. So this takes what that search found (`--candidates`, its JSON), for all numbers of rows, times it alone, and
then times decode steps of the model with each of the best, matrix by matrix, in turn with torch's own choice. Contexts are as long
as those of the offline workload with so many rows left. `--prompts` does the same for a prefill step of so many tokens. Random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from linear import BYTES_IN_TURN, time_us  # the program beside this one

from minisgl.core import Batch, SamplingParams, SlotSetup, make_batch
from minisgl.engine.memory import graph_sizes
from minisgl.kernel import products
from minisgl.kernel.products import Product, library
from minisgl.llm import LLM

Name = tuple[int, ...]
Matrix = tuple[int, int]
"""outputs, inputs"""
LARGEST_ERROR = 2e-2
NUM_TIMED = 5
"""Decode steps that are timed together."""
NUM_ROUNDS = 3
COLUMNS = 33
"""Pages of a row that no other row has."""
NEAR = 80
"""Algorithms found for numbers of rows that differ by no more are tried alone."""
LEAST_GAIN = 1.002
"""Of a whole step."""


class Model:
    """A model with random weights, and steps of any size."""

    def __init__(self, path: str) -> None:
        self.llm = LLM(path, use_dummy_weight=True)
        self._engine: Any = self.llm.scheduler.engine
        self.limits = self._engine.limits
        self._graphs = self._engine._graphs[0]
        pool = self._engine._attention.pool
        for tensor in (pool.k, pool.v):
            tensor.normal_()
        table = self._engine._attention.page_table
        order = torch.randperm(self.limits.num_pages, device=table.device, dtype=torch.int32)
        slots, columns = (torch.arange(count, device=table.device) for count in table.shape)
        table.copy_(order[(slots[:, None] * COLUMNS + columns) % len(order)])
        self._table = table.cpu().numpy()
        self.weights: dict[Matrix, list[torch.Tensor]] = {}
        """As the products of a step see them, in order."""
        self.named = products._named(table.device)
        self.run(self.batch([64], [1]), 1)
        self._kept = self._graphs._captured.copy()  # so that the pool of the graphs stays

    def batch(self, cached: list[int], extend: list[int]) -> Batch:
        """A step of rows with so many tokens in pages and so many new ones, all of which sample."""
        page_size, rows = self.limits.page_size, len(cached)
        positions = [np.arange(a, a + n, dtype=np.int32) for a, n in zip(cached, extend, strict=True)]
        places = [self._table[slot][at // page_size] * page_size + at % page_size for slot, at in enumerate(positions)]
        draw = np.random.default_rng(0)
        slots = np.arange(rows, dtype=np.int32)
        arrays = {
            "slots": slots,
            "cached_lens": np.array(cached, dtype=np.int32),
            "extend_lens": np.array(extend, dtype=np.int32),
            "input_ids": draw.integers(0, 10000, sum(extend), dtype=np.int32),
            "positions": np.concatenate(positions),
            "write_slots": np.concatenate(places).astype(np.int32),
            "sample_rows": slots,
        }
        nothing, params = np.empty(0, dtype=np.int32), SamplingParams(temperature=0.6)
        self._engine._sampler.set_up([SlotSetup(slot, params, slot, frozenset(), nothing, nothing) for slot in range(rows)])
        return make_batch(0, tuple(range(rows)), arrays)

    def run(self, batch: Batch, count: int) -> float:
        """Microseconds of a step, of so many launched as the scheduler launches them: one ahead."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._engine.submit(batch).read()
        start.record()
        before = self._engine.submit(batch)
        for _ in range(count - 1):
            handle = self._engine.submit(batch)
            before.read()
            before = handle
        end.record()
        before.read()
        return float(start.elapsed_time(end) * 1000 / count)

    def take(self, choice: dict[tuple[int, int, int], Name]) -> None:
        """Compute with these algorithms from now on, and else by torch's choice; graphs are captured anew."""
        self.named.clear()
        self.named.update({sizes: list(name) for sizes, name in choice.items()})
        products._prepared.cache_clear()
        self._graphs._captured.clear()

    def graph(self, size: int) -> Any:
        return self._graphs._captured.get(size)

    def put(self, size: int, graph: Any) -> None:
        self._graphs._captured[size] = graph

    def note_weights(self, batch: Batch) -> None:
        """Fill `weights` from one step."""
        original = products.product

        def noting(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if not any(weight is known for known in self.weights.setdefault(tuple(weight.shape), [])):
                self.weights[tuple(weight.shape)].append(weight)
            return original(x, weight, bias)

        products.product = noting
        self._engine.submit(batch).read()
        products.product = original
        self._graphs._captured.clear()


def alone(rows: int, matrix: Matrix, names: Iterable[Name], weights: list[torch.Tensor]) -> list[Name]:
    """Of those that compute the product rightly, the fastest when nothing else runs, the best first."""
    count = min(len(weights), int(BYTES_IN_TURN // (2 * matrix[0] * matrix[1])) + 2)
    x = torch.randn(rows, matrix[1], device="cuda", dtype=torch.bfloat16)
    expected = F.linear(x, weights[0])
    largest = float(expected.abs().max())
    found = []
    for name in names:
        try:
            product = Product(rows, *matrix, name)
            out = product(x, weights[0])
        except RuntimeError:  # the library refuses it
            continue
        if float((out - expected).abs().max()) < LARGEST_ERROR * largest:
            found.append((time_us(partial(product, x), weights[:count], 3), name))
    return [name for _, name in sorted(found)]


def spread(names: list[Name], count: int) -> list[Name]:
    """The best, and no three of the same tile."""
    kept: list[Name] = []
    for name in names:
        if sum(name[1] == other[1] for other in kept) < 2:
            kept.append(name)
    return kept[:count]


def search(
    model: Model, rows: int, batch: Batch, pools: dict[Matrix, list[Name]], is_graph: bool, num_tried: int
) -> tuple[dict[Matrix, Name], list[dict[str, Any]]]:
    """The algorithms that make a step of `rows` new tokens faster, and what was measured."""
    chosen: dict[Matrix, Name] = {}
    report: list[dict[str, Any]] = []

    def variant(choice: dict[Matrix, Name]) -> Callable[[], float]:
        model.take({(rows, *matrix): name for matrix, name in choice.items()})
        model.run(batch, 1)
        graph = model.graph(rows) if is_graph else None

        def measure() -> float:
            if is_graph:
                model.put(rows, graph)
            else:
                model.take({(rows, *matrix): name for matrix, name in choice.items()})
            return model.run(batch, NUM_TIMED if is_graph else 2)

        return measure

    for matrix, pool in pools.items():
        best = spread(alone(rows, matrix, pool, model.weights[matrix]), num_tried)
        base = variant(chosen)
        ratios: list[tuple[float, Name]] = []
        for name in best:
            other = variant({**chosen, matrix: name})
            ratios.append((base() / other(), name))
        ratios.sort(reverse=True)
        finals = [(name, variant({**chosen, matrix: name})) for ratio, name in ratios[:2] if ratio > 1]
        again: list[tuple[float, Name]] = []
        for name, other in finals:
            pairs = [(base(), other()) for _ in range(NUM_ROUNDS)]
            again.append((statistics.median(a / b for a, b in pairs), name))
        gain, name = max(again, default=(1.0, ()))
        report.append({"rows": rows, "matrix": matrix, "tried": ratios, "again": again, "step_us": base()})
        if gain >= LEAST_GAIN:
            chosen[matrix] = name
    whole, plain = variant(chosen), variant({})
    pairs = [(plain(), whole()) for _ in range(NUM_ROUNDS)]
    report.append({"rows": rows, "chosen": list(chosen.items()), "torch_us": pairs[0][0], "ratios": [a / b for a, b in pairs]})
    return chosen, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--candidates", type=Path, nargs="+", required=True, help="JSON files of products.py")
    parser.add_argument("--rows", type=int, nargs="*", help="of decode steps (default: all sizes of graphs down to 8)")
    parser.add_argument("--prompts", type=int, default=0, help="tokens of a prefill step; 0: none")
    parser.add_argument("--tries", type=int, default=4, help="algorithms of a matrix that are tried in the model")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further size after that")
    parser.add_argument("--out", type=Path, help="JSON file of all that was measured")
    parser.add_argument("--table", type=Path, help="table to write: the present one with what was chosen")
    args = parser.parse_args()
    begun = time.monotonic()
    torch.inference_mode().__enter__()
    model = Model(args.model)
    before = {sizes: tuple(name) for sizes, name in model.named.items()}
    cells = [cell for file in args.candidates for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]]
    report: list[dict[str, Any]] = []
    table = dict(before)
    sizes = args.rows if args.rows is not None else [size for size in graph_sizes(model.limits.max_running_req) if size >= 8][::-1]
    for rows in [*([args.prompts] if args.prompts else []), *sizes]:
        is_graph = rows != args.prompts
        # rows of the offline workload: the more are left, the less each has said; its prompts have 558 tokens on average
        lens = [1600 - 4 * rows + (37 * row) % 200 for row in range(rows)] if is_graph else [0] * 15
        extend = [1] * rows if is_graph else [*[rows // 15] * 14, rows - rows // 15 * 14]
        batch = model.batch(lens, extend)
        if not model.weights:
            model.note_weights(batch)
        own: dict[Matrix, list[Name]] = {}
        for cell in cells:
            num_tokens, *matrix = cell["sizes"]
            if tuple(matrix) in model.weights and abs(num_tokens - rows) <= (NEAR if is_graph else rows - 512):
                own.setdefault(tuple(matrix), []).extend(tuple(name) for _, name in cell["best"])
        own = {matrix: list(dict.fromkeys(names)) for matrix, names in own.items()}
        chosen, found = search(model, rows, batch, own, is_graph, args.tries)
        table = {cell: name for cell, name in table.items() if cell[0] != rows or cell[1:] not in own}
        table |= {(rows, *matrix): name for matrix, name in chosen.items()}
        report += found
        ratio, whole_us = statistics.median(found[-1]["ratios"]), found[-1]["torch_us"]
        print(f"{rows} rows: {whole_us:.0f} us, {ratio:.4f} times as fast by {chosen}", flush=True)
        written = {
            "device": torch.cuda.get_device_name(),
            "cublaslt": library().version,
            "algorithms": [[*cell, *name] for cell, name in sorted(table.items(), key=lambda item: (item[0][1:], item[0][0]))],
        }
        if args.out:
            args.out.write_text(json.dumps(report) + "\n", encoding="utf-8")
        if args.table:
            args.table.write_text(json.dumps(written) + "\n", encoding="utf-8")
        if time.monotonic() > begun + args.seconds:
            break


if __name__ == "__main__":
    main()
