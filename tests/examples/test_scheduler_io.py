"""The example without a model runs, ends by itself, and both ranks hear the three messages in order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "scheduler_io.py"


def test_both_ranks_of_the_example_hear_the_same(tmp_path):
    result = subprocess.run([sys.executable, str(PROGRAM)], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr
    expected = [f"the uid sequence rank {rank} received: [0, 1, 2]" for rank in range(2)]
    assert sorted(result.stdout.splitlines()) == expected
