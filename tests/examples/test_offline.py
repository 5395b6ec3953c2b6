"""The example of the offline class runs, and shows what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "offline.py"


def test_the_example_of_the_offline_class_runs(tiny_models, tmp_path):
    command = [sys.executable, str(PROGRAM), str(tiny_models("llama"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "'The capital of France is' -> " in done.stdout
    assert "\nchat: " in done.stdout
    assert "\nchoices: [" in done.stdout
    assert done.stdout.count("log probability -") == 2
    assert done.stdout.endswith("good: None, bad: the prompt is empty; at least one token is wanted\n")
