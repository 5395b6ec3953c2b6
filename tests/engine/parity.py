"""The parity check: an engine's greedy run of a tiny model's prompts against the reference run in its expected.json.

Two quantities: token ids, which must be equal, and logits of the reference's five likeliest tokens at every step, which may differ by
NOISE_BOUND times the difference that fp32 rounding alone makes (fp32 against fp64 in the reference).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import Engine, make_engine
from tests.tools.plan import Planner

NOISE_BOUND = 5.0
NUM_PAGES = 128


@dataclass(frozen=True)
class Expected:
    """What transformers computed for one tiny model."""

    raw: dict[str, Any]

    @classmethod
    def of(cls, model_dir: Path) -> Expected:
        return cls(json.loads((model_dir / "expected.json").read_text(encoding="utf-8")))

    @cached_property
    def noise(self) -> float:
        return float(self.raw["max_noise_fp32_vs_fp64"])

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [case["ids"] for case in self.raw["cases"]]

    @cached_property
    def outputs(self) -> list[list[int]]:
        return [case["out"] for case in self.raw["cases"]]

    def top5(self, case: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and logits [steps, 5]"""
        own = self.raw["cases"][case]
        return torch.tensor(own["top5_ids"]), torch.tensor(own["top5_logits"])


@dataclass(frozen=True)
class Run:
    """One prompt's run."""

    token_ids: list[int]
    logits: torch.Tensor
    """[steps, V]"""


def tiny_engine(model_dir: Path, **config: Any) -> Engine:
    settings: dict[str, Any] = {"model_path": str(model_dir), "num_pages": NUM_PAGES, "max_running_req": 8, "device": "cpu"}
    return make_engine(EngineConfig(**(settings | config)))


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], num_new: int, budget: int = 8192, forced: Sequence[Sequence[int]] | None = None
) -> list[Run]:
    """Greedy runs of all prompts together. Each step computes one token of every row that is past its prompt and up to `budget` prompt
    tokens of the others, in one plan. `forced`: continue with these tokens, whatever the logits say."""
    planner = Planner(engine.limits.num_pages, engine.limits.page_size, engine.limits.max_running_req)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for uid, prompt in enumerate(prompts):
        planner.add(uid, prompt)
    while planner.rows:
        batch = planner.plan(_share(planner, budget, outputs))
        with torch.inference_mode():
            step = engine.forward(batch)
        for row, values in zip(batch.sample_rows.tolist(), step, strict=True):
            uid = batch.uids[row]
            logits[uid].append(values.float())
            outputs[uid].append(int(values.argmax()) if forced is None else forced[uid][len(outputs[uid])])
            planner.rows[uid].tokens.append(outputs[uid][-1])
            if len(outputs[uid]) == num_new:
                planner.drop(uid)
    return [Run(ids, torch.stack(values)) for ids, values in zip(outputs, logits, strict=True)]


def _share(planner: Planner, budget: int, outputs: list[list[int]]) -> dict[int, int]:
    extend = {uid: 1 for uid in planner.rows if outputs[uid]}
    for uid, row in planner.rows.items():
        if not outputs[uid] and budget > 0:
            extend[uid] = min(row.num_left, budget)
            budget -= extend[uid]
    return extend


def differences(expected: Expected, runs: Sequence[Run], cases: Sequence[int] | None = None) -> Iterator[str]:
    """Every way in which the runs of `cases` (all by default) leave the reference, in words."""
    for case, own in zip(range(len(runs)) if cases is None else cases, runs, strict=True):
        wanted = expected.outputs[case][: len(own.token_ids)]
        if own.token_ids != wanted:
            step = next(i for i, (a, b) in enumerate(zip(own.token_ids, wanted, strict=True)) if a != b)
            yield f"case {case}: ids differ from step {step}"
            continue
        ids, logits = (t[: len(own.token_ids)] for t in expected.top5(case))
        error = float((own.logits.gather(1, ids) - logits).abs().max()) / expected.noise
        if not error <= NOISE_BOUND:
            yield f"case {case}: logits are {error:.1f} times the noise away"


def top5_errors(expected: Expected, runs: Sequence[Run]) -> list[torch.Tensor]:
    """|logit - reference| of the five likeliest tokens of each case, [steps, 5]."""
    result = []
    for case, own in enumerate(runs):
        ids, logits = (t[: len(own.token_ids)] for t in expected.top5(case))
        result.append((own.logits.gather(1, ids) - logits).abs())
    return result
