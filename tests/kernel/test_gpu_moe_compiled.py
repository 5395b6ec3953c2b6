"""The mixture of experts as compiled for sm_90: no spills, the widest tensor-core instruction, weights by asynchronous copies. No GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # of all compilations, which the first test waits for

ROOT = Path(__file__).resolve().parents[2]
LARGE = ("1,bf16", "128,bf16", "256,bf16", "1024,bf16", "2048,bf16")
"""One for each configuration of Qwen3-30B-A3B's layer."""
OFTEN = ("1,bf16", "2048,bf16")
EXACT = "2048,fp32"
TINY = "3,bf16,32,24,4,2"
SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, for one program."""


@pytest.fixture(scope="module")
def reports(request):
    """Case -> kernel -> facts; without the slow tests, of two of the large cases."""
    large = LARGE if any(item.get_closest_marker("slow") for item in request.session.items if item.path == request.path) else OFTEN
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel.compile_moe", *large, EXACT, TINY]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {line.pop("case"): line for line in map(json.loads, done.stdout.splitlines())}


def test_nothing_spills_and_everything_fits(reports):
    assert set(reports) >= {*OFTEN, EXACT, TINY}
    for case, kernels in reports.items():
        assert set(kernels) == {"route", "gate_up", "down", "sum"} | (set() if case == "1,bf16" else {"sort"}), case
        for name, found in kernels.items():
            assert (found["STL"], found["LDL"], found["stack"]) == (0, 0, 0), (case, name)
            assert found["registers"] * found["threads"] <= 65536, (case, name)
            assert found["shared_bytes"] <= SHARED_BYTES, (case, name)


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.slow) for case in LARGE])
def test_products_run_on_tensor_cores_and_copy_ahead(reports, case, product):
    found = reports[case][product]
    assert found["HGMMA"] > 0
    assert found["HMMA"] == 0
    assert found["LDGSTS"] > 0


@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_fp32_is_not_rounded_for_tensor_cores(reports, product):
    found = reports[EXACT][product]
    assert (found["HGMMA"], found["HMMA"]) == (0, 0)
