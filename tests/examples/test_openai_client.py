"""The example of the HTTP client runs, alone against a server without a model and inside scripts/demo with the embedded one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.server_process import server_process, write_byte_model

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_of_the_client_shows_the_answer_and_the_speed(tmp_path):
    with server_process(write_byte_model(tmp_path / "model"), options={"served_model_name": "x-sayer"}) as server:
        server.wait_until_ready()
        command = [sys.executable, str(ROOT / "examples" / "openai_client.py"), f"{server.url}/v1", "Hello"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "x" * 256 + "\n"), done.stderr
    assert re.fullmatch(r"\[x-sayer: 256 tokens in [0-9.]+ s, [0-9.]+ tokens/s\]\n", done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("embedded_model")
def test_the_demo_answers_over_http_and_says_how_to_go_on():
    command = [str(ROOT / "scripts" / "demo"), "What is the capital of France?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr
    assert "minisgl serve" in done.stderr
