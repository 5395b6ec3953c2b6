"""Ranks start and end again and again, and never hang and leave nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 15.0
"""Of a cycle. One takes a fraction of a second; a wait that some time-out ends takes longer."""


def run_cycles(count, size, directory):
    result = directory / "result"
    command = [sys.executable, "-m", "tests.scheduler.start_stop", str(count), str(size), str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert (found["cycles"], found["wrong"], done.stderr) == (count, {}, "")
    assert found["longest_s"] < LONGEST_S


def test_three_cycles_of_two_ranks(tmp_path):
    run_cycles(3, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_cycles_of_two_ranks(tmp_path):
    run_cycles(200, 2, tmp_path)
