"""Launches by way of `kernel.gpu.launch`; those of compiled kernels are checked by a program of its own, `launch_compiled`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from minisgl.kernel.gpu import launch
from minisgl.kernel.gpu.launch import Launcher, ceil_div, collecting, compile_together, next_power_of_2

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "kernel" / "launch_compiled.py"
CHECKS = re.findall(r"^def (check_\w+)\(", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def output():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error::DeprecationWarning:minisgl", "-m", "tests.kernel.launch_compiled"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def troubles(output):
    return {name: trouble for line in output.stdout.splitlines() for name, trouble in json.loads(line).items()}


class Plain(JITFunction):
    """A Triton kernel whose launches are written down."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append((grid, args, options))


def test_where_triton_lacks_what_the_keys_are_made_of_all_launches_go_its_way(monkeypatch):
    monkeypatch.setattr(launch, "native_specialize_impl", None)  # Triton 3.5
    kernel = Plain()
    launcher = Launcher(kernel)
    with collecting() as noted:
        launcher((2,), "x", 1, block=3, num_warps=4)
        launcher.prepare(1, 3, num_warps=4)((5,), "y")
    assert noted == {}
    assert kernel.launched == [((2,), ("x", 1), {"block": 3, "num_warps": 4}), ((5,), ("y", 1, 3), {"num_warps": 4})]


@pytest.mark.parametrize("check", CHECKS)
def test_compiled(troubles, check):
    assert troubles[check] == ""


def test_a_compiling_process_writes_nothing(output):
    assert output.stdout.count('"said": "once"') == 1
    assert "from a child" not in output.stdout + output.stderr


@Launcher
@triton.jit
def _double(out, x, n, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def test_the_interpreter_runs_what_a_gpu_would_note(device):
    x = torch.arange(64.0, device=device)
    out = torch.zeros_like(x)
    with collecting() as noted:
        for _ in range(2):
            _double((1,), out, x, 32, 32)
            _double.prepare(32)((1,), out, x[1:], 32)
    is_interpreted = device.type == "cpu"
    assert len(noted) == (0 if is_interpreted else 2)
    assert torch.equal(out[:32], 2 * x[1:33] if is_interpreted else 0 * x[:32])


@pytest.mark.gpu
def test_kernels_compiled_together_run_on_a_gpu(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.arange(64.0, device=device)
    out = torch.zeros_like(x)
    with collecting() as noted:
        for y in (x, x[1:]):
            _double((1,), out, y, 48, 64)
    compile_together(noted.values())
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: hits.append(facts["cache_hit"]))
    for y in (x, x[1:]) * 3:
        _double((1,), out.zero_(), y, 48, 64)
        assert torch.equal(out[:48], 2 * y[:48])
    assert hits == [True, True]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _double((1,), out, x, 48, 64)
    x += 1
    graph.replay()
    assert torch.equal(out[:48], 2 * x[:48])


def test_arithmetic_is_that_of_triton():
    for n in (*range(1, 70), 1023, 1024, 1025, 151_936):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert [ceil_div(n, b) for b in (1, 2, 7, 128)] == [triton.cdiv(n, b) for b in (1, 2, 7, 128)]
