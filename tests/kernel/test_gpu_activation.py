"""The SiLU-mul kernel against its twin and fp64."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel import reference
from minisgl.kernel.gpu.activation import silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3072), (3, 1), (2, 130), (5, 1025)])
def test_silu_mul(device, dtype, shape):
    gate_up = (torch.randn(shape[0], 2 * shape[1], device=device) * 6).to(dtype)
    out, twin = silu_mul(gate_up), reference.silu_mul(gate_up)
    assert (out.dtype, out.shape) == (dtype, shape)
    if dtype == torch.float32:
        gate, up = gate_up.double().chunk(2, -1)
        torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, rtol=5e-6, atol=1e-30)  # exp of a GPU
    else:
        torch.testing.assert_close(out, twin, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).tiny)
        assert int((out != twin).sum()) <= max(2, out.numel() // 100)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # as on a GPU
def test_extreme_gates(device):
    gate = torch.tensor([-300.0, -88.0, 0.0, 88.0, 300.0, float("inf"), float("nan")], device=device)
    out = silu_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), rtol=1e-5, atol=1e-30, equal_nan=True)


def test_rows_that_are_not_contiguous(device):
    gate_up = torch.randn(4, 2, 64, device=device)
    torch.testing.assert_close(silu_mul(gate_up[:, 1]), reference.silu_mul(gate_up[:, 1]), rtol=1e-5, atol=1e-6)
