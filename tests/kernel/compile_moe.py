"""Compile the kernels of the mixture of experts for sm_90 without a GPU; prints one JSON line per case.

    python -m tests.kernel.compile_moe CASE...

A case is `tokens,type` for one layer of Qwen3-30B-A3B, or `tokens,type,hidden,width,experts,chosen`. A program of its own, since the test
process has Triton's interpreter switched on.
"""

from __future__ import annotations

import json
import sys

import torch

from minisgl.kernel.gpu import moe
from tests.kernel.compile_attention import Recorder, facts

NAMES = ("_route_kernel", "_sort_kernel", "_product_kernel", "_sum_kernel")
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class EachLaunch(Recorder):
    """Keeps what every launch compiled, and its threads, in order."""

    def __init__(self, kernel):
        super().__init__(kernel, 90)
        self.found = []

    def __call__(self, grid, *args, **constants):
        super().__call__(grid, *args, **constants)
        self.found.append((self.compiled, 32 * constants["num_warps"]))


KERNELS = {name: getattr(moe, name).kernel for name in NAMES}


def tensor(*shape, dtype):
    """A shape and a type: nothing is launched, so no memory is needed."""
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_layer(tokens, dtype, hidden=2048, width=768, num_experts=128, num_chosen=8):
    recorders = {name: EachLaunch(kernel) for name, kernel in KERNELS.items()}
    for name, recorder in recorders.items():
        setattr(moe, name, recorder)
    x, logits = tensor(tokens, hidden, dtype=dtype), tensor(tokens, num_experts, dtype=dtype)
    gate_up, down = tensor(num_experts, 2 * width, hidden, dtype=dtype), tensor(num_experts, hidden, width, dtype=dtype)
    moe.experts(x, gate_up, down, *moe.route(logits, num_chosen, True))
    gated, plain = recorders.pop("_product_kernel").found
    single = {name.strip("_").removesuffix("_kernel"): recorder.found for name, recorder in recorders.items()}
    return {"gate_up": gated, "down": plain, **{name: found[0] for name, found in single.items() if found}}


def main():
    launches = {}
    for case in sys.argv[1:]:
        tokens, dtype, *sizes = case.split(",")
        for kernel, launch in compile_layer(int(tokens), TYPES[dtype], *map(int, sizes)).items():
            launches[case, kernel] = launch
    reports = {}
    for (case, kernel), (_, threads), found in zip(
        launches, launches.values(), facts([each for each, _ in launches.values()]), strict=True
    ):
        reports.setdefault(case, {"case": case})[kernel] = {"threads": threads, **found}
    for report in reports.values():
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
