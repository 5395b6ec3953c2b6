"""Choose among cuBLASLt's algorithms by the time of whole steps; writes the table that minisgl takes.

    python benchmark/gpu/products_in_model.py --model DIR --candidates FILE [--rows N ...] [--prompts N] [--out FILE] [--table FILE]

`products.py` times a product alone. In a model it runs between other kernels, and what is the fastest alone need not be the fastest
there. So this takes what that search found (`--candidates`, its JSON) for near numbers of rows, times it alone, and then times decode
steps of the model with each of the best, matrix by matrix, in turn with what is chosen so far. What does not make the whole step faster
than torch's own choice is dropped. Contexts are as long as those of the offline workload with so many rows left. `--prompts` does the same
for a prefill step of so many tokens. Random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from linear import BYTES_IN_TURN  # the programs beside this one
from products import Name, time_of, write_table

from minisgl.core import Batch, SamplingParams, SlotSetup, make_batch
from minisgl.engine.memory import MAX_EXTEND_GRAPH_TOKENS, graph_sizes
from minisgl.kernel import products
from minisgl.kernel.products import library
from minisgl.llm import LLM

Matrix = tuple[int, int]
"""outputs, inputs"""
Sizes = tuple[int, int, int]
"""new tokens, outputs, inputs"""
NUM_TIMED = 5
"""Decode steps that are timed together."""
NUM_ROUNDS = 4
"""Pairs that are timed before something is chosen."""
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
        assert "decode" in self._graphs.name
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
        end.synchronize()
        return float(start.elapsed_time(end) * 1000 / count)

    def take(self, choice: dict[Sizes, Name]) -> None:
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
    count = int(BYTES_IN_TURN // (2 * matrix[0] * matrix[1])) + 2
    x = torch.randn(rows, matrix[1], device="cuda", dtype=torch.bfloat16)
    times = [(time_of(name, x, weights[:count], 3), name) for name in names]
    return [name for _, name in sorted((us, name) for us, name in times if us is not None)]


def spread(names: list[Name], count: int) -> list[Name]:
    """The best, and no three of the same tile."""
    kept: list[Name] = []
    for name in names:
        if sum(name[1] == other[1] for other in kept) < 2:
            kept.append(name)
    return kept[:count]


def search(
    model: Model, rows: int, batch: Batch, pools: dict[Matrix, list[Name]], kept: dict[Sizes, Name], num_tried: int
) -> tuple[dict[Matrix, Name], list[dict[str, Any]]]:
    """The algorithms that make a step of `rows` new tokens faster, and what was measured; products in `kept` stay as named there."""
    chosen: dict[Matrix, Name] = {}
    report: list[dict[str, Any]] = []
    is_graph = batch.is_decode

    def variant(choice: dict[Matrix, Name]) -> Callable[[], float]:
        """What measures a step with this choice."""
        names = {**kept, **{(rows, *matrix): name for matrix, name in choice.items()}}
        model.take(names)
        model.run(batch, 1)
        graph = model.graph(rows) if is_graph else None

        def measure() -> float:
            if is_graph:
                model.put(rows, graph)
            else:
                model.take(names)
            return model.run(batch, NUM_TIMED if is_graph else 2)

        return measure

    def gains(before: Callable[[], float], after: Callable[[], float], rounds: int) -> list[float]:
        """How many times as fast, once a round; who begins changes, after a run that does not count."""
        after()
        ratios = []
        for number in range(rounds):
            first, second = (before, after) if number % 2 else (after, before)
            times = first(), second()
            ratios.append(times[0] / times[1] if number % 2 else times[1] / times[0])
        return ratios

    for matrix, pool in pools.items():
        best = spread(alone(rows, matrix, pool, model.weights[matrix]), num_tried)
        base = variant(chosen)
        tried = [(statistics.mean(gains(base, variant({**chosen, matrix: name}), 2)), name) for name in best]
        finals = [name for gain, name in sorted(tried, reverse=True)[:2] if gain > 1]
        again = [(statistics.median(gains(base, variant({**chosen, matrix: name}), NUM_ROUNDS)), name) for name in finals]
        report.append({"rows": rows, "matrix": matrix, "tried": tried, "again": again, "step_us": base()})
        gain, name = max(again, default=(1.0, ()))
        if gain >= LEAST_GAIN:
            chosen[matrix] = name
    plain, whole = variant({}), variant(chosen)
    ratios = gains(plain, whole, NUM_ROUNDS)
    report.append({"rows": rows, "chosen": list(chosen.items()), "torch_us": plain(), "ratios": ratios})
    return chosen if statistics.median(ratios) >= LEAST_GAIN else {}, report


@torch.inference_mode()
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
    model = Model(args.model)
    cells = [cell for file in args.candidates for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]]
    report: list[dict[str, Any]] = []
    table = {cell: tuple(name) for cell, name in model.named.items()}
    sizes = [size for size in graph_sizes(model.limits.max_running_req) if size >= 8][::-1]
    if not set(args.rows or ()).issubset(sizes):
        parser.error(f"--rows: sizes of graphs are {sizes}")
    if 0 < args.prompts <= MAX_EXTEND_GRAPH_TOKENS:
        parser.error(f"--prompts: steps of up to {MAX_EXTEND_GRAPH_TOKENS} tokens are graphs, of which each variant would need its own")
    for rows in [*([args.prompts] if args.prompts else []), *(sizes if args.rows is None else args.rows)]:
        is_graph = rows != args.prompts  # a prefill step is none
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
        table = {cell: name for cell, name in table.items() if cell[0] != rows or cell[1:] not in own}
        chosen, found = search(model, rows, batch, own, table, args.tries)
        table |= {(rows, *matrix): name for matrix, name in chosen.items()}
        report += found
        ratio, whole_us = statistics.median(found[-1]["ratios"]), found[-1]["torch_us"]
        print(f"{rows} rows: {whole_us:.0f} us, {ratio:.4f} times as fast by {chosen}", flush=True)
        if args.out:
            taken = {"device": torch.cuda.get_device_name(), "cublaslt": library().version, "model": Path(args.model).name}
            args.out.write_text(json.dumps({**taken, "sizes": report}) + "\n", encoding="utf-8")
        if args.table:
            write_table(args.table, [(*cell, *name) for cell, name in sorted(table.items(), key=lambda item: (item[0][1:], item[0][0]))])
        if time.monotonic() > begun + args.seconds:
            break


if __name__ == "__main__":
    main()
