"""minisgl beside transformers on a CPU: the embedded model, fp32, all cores, both sides in alternation, medians and ratios.

    python benchmark/cpu_speed.py [--rounds 5] [--out benchmark/results/cpu_speed.json]

Prefill: one prompt of 512 tokens, default settings. Decode: 1, 8 and 32 requests of 64 prompt tokens, 32 new tokens each, greedy; the
time of the prompts is taken off by a run that samples one token. There all prompts are computed in one step on both sides
(`max_extend_tokens`), so that all requests decode together: with the default of 256, the first ones decode while the last wait.
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
from pathlib import Path
from typing import Any

import torch

NUM_PROMPT, NUM_NEW = 64, 32
NUM_PREFILL = 512
ROWS = (1, 8, 32)


def prompts(num_rows: int, num_tokens: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 20000, (num_rows, num_tokens), generator=generator).tolist()


def run_minisgl(llm: Any, batch: list[list[int]], num_new: int) -> float:
    from minisgl.core import SamplingParams

    start = time.perf_counter()
    llm.generate(batch, SamplingParams(max_tokens=num_new, ignore_eos=True), progress=False)
    return time.perf_counter() - start


def run_transformers(model: Any, batch: list[list[int]], num_new: int) -> float:
    ids = torch.tensor(batch)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        for _ in range(num_new - 1):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
    return time.perf_counter() - start


def decode_rate(run: Callable[[list[list[int]], int], float], num_rows: int, seed: int) -> float:
    """Tokens per second of decoding alone."""
    whole = run(prompts(num_rows, NUM_PROMPT, seed), NUM_NEW)
    first = run(prompts(num_rows, NUM_PROMPT, seed + 1), 1)
    return num_rows * (NUM_NEW - 1) / (whole - first)


def measure(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Name of the measurement -> side -> tokens per second of each round."""
    from transformers import AutoModelForCausalLM

    from minisgl.llm import LLM
    from minisgl.models.embedded import embedded_model_path

    path = str(embedded_model_path())
    llm = LLM(path, cache_type="naive", num_pages=600)
    at_once = LLM(path, cache_type="naive", num_pages=600, max_extend_tokens=max(ROWS) * NUM_PROMPT)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    sides: dict[str, Callable[[list[list[int]], int], float]] = {
        "minisgl": lambda batch, num_new: run_minisgl(llm if len(batch) == 1 else at_once, batch, num_new),
        "transformers": lambda batch, num_new: run_transformers(model, batch, num_new),
    }
    results: dict[str, dict[str, list[float]]] = {
        name: {side: [] for side in sides} for name in ("prefill", *(f"decode {rows}" for rows in ROWS))
    }
    for run in sides.values():
        run(prompts(2, 16, 0), 4)
    for index in range(num_rounds):
        for side, run in sides.items():
            results["prefill"][side].append(NUM_PREFILL / run(prompts(1, NUM_PREFILL, index), 1))
        for rows in ROWS:
            for side, run in sides.items():
                results[f"decode {rows}"][side].append(decode_rate(run, rows, 100 * index + rows))
    llm.close()
    at_once.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with all measurements of both sides")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    results = measure(args.rounds)
    table = {}
    for name, by_side in results.items():
        medians = {side: statistics.median(values) for side, values in by_side.items()}
        ratio = statistics.median(a / b for a, b in zip(by_side["minisgl"], by_side["transformers"], strict=True))
        table[name] = {**medians, "ratio": ratio, "rounds": by_side}
        print(f"{name:10}  minisgl {medians['minisgl']:7.1f} tok/s   transformers {medians['transformers']:7.1f}   ratio {ratio:.2f}")
    if args.out:
        import transformers

        about = {
            "command": " ".join(["python", *sys.argv]),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
            "hardware": {
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "capability": torch.backends.cpu.get_cpu_capability(),
            },
        }
        args.out.write_text(json.dumps({**about, "results": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
