"""The small kernels as compiled for sm_90: no spills, wide loads, short code. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VALUES_PER_THREAD = 2048 / 128
"""Of the sampling kernel: tokens of a block by threads of a program."""


@pytest.fixture(scope="module")
def reports():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel.compile_small"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def test_nothing_spills(reports):
    assert len(reports) == 19
    for report in reports.values():
        assert report["stack"] == 0
        assert not any(name.startswith(("LDL", "STL")) for name in report)
        assert report["registers"] <= (128 if report["name"].startswith("limits") else 80)


@pytest.mark.parametrize("kernel", ["rms_norm", "add_rms_norm", "silu_mul", "rope_and_store"])
@pytest.mark.parametrize("model", ["0.6B", "14B"])
def test_rows_are_read_and_written_16_bytes_at_a_time(reports, kernel, model):
    memory = {name for name in reports[f"{kernel} {model}"] if name.startswith(("LDG", "STG"))}
    assert memory - {"LDG.E"} == {"LDG.E.128", "STG.E.128"}
    assert ("LDG.E" in memory) == (kernel == "rope_and_store"), "its slot alone is one number"


def test_the_draw_uses_the_logarithm_of_the_hardware(reports):
    """Two per token, and about 60 instructions per token with all that a program does once (38 without)."""
    report = reports["sample"]
    assert report["MUFU.LG2"] == 2 * VALUES_PER_THREAD
    assert report["LDG.E.128"] == VALUES_PER_THREAD / 8
    assert report["instructions"] <= 62 * VALUES_PER_THREAD


@pytest.mark.parametrize("name", ["limits bf16", "limits fp32", "resample bf16", "resample fp32", "adjust"])
def test_rows_of_logits_are_read_16_bytes_at_a_time(reports, name):
    assert "LDG.E.128" in reports[name]
    assert not any(word.startswith(("LDG.E.U8", "LDG.E.U16")) for word in reports[name])
