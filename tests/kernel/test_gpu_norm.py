"""The RMSNorm kernels against their twins and fp64."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel import reference
from minisgl.kernel.gpu.norm import add_rms_norm, rms_norm

SHAPES = [(1, 1024), (5, 128), (3, 1), (9, 80), (2, 1000), (1, 5120), (2, 9001)]


def norm64(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check(out, x, weight, eps):
    """Exactly the twin but where the order of a sum moves a rounding, which it does for few values, by one step."""
    if x.dtype == torch.float32:
        torch.testing.assert_close(out.double(), norm64(x, weight, eps), rtol=1e-6, atol=1e-7)
        return
    twin = reference.rms_norm(x, weight, eps)
    torch.testing.assert_close(out, twin, rtol=2**-7, atol=0)
    assert int((out != twin).sum()) <= max(3, out.numel() // 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(device, dtype, shape):
    x, weight = (torch.randn(shape, device=device) * 3).to(dtype), torch.randn(shape[1], device=device).to(dtype)
    before = x.clone()
    out = rms_norm(x, weight, 1e-6)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    check(out, x, weight, 1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(device, dtype, shape):
    x, residual = ((torch.randn(shape, device=device) * 3).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1], device=device).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    check(normed, total, weight, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_eps_counts_and_squares_do_not_overflow(device):
    weight = torch.ones(64, device=device)
    assert torch.equal(rms_norm(torch.zeros(2, 64, device=device), weight, 1e-6), torch.zeros(2, 64, device=device))
    small = torch.randn(2, 64, device=device) * 1e-3
    check(rms_norm(small, weight, 0.5), small, weight, 0.5)
    large = (torch.randn(2, 64, device=device) * 3000).half()
    check(rms_norm(large, weight.half(), 1e-6), large, weight.half(), 1e-6)


def test_rows_that_are_not_contiguous(device):
    x, weight = torch.randn(6, 3, 48, device=device), torch.randn(48, device=device)
    check(rms_norm(x[:, 1], weight, 1e-6), x[:, 1], weight, 1e-6)


def test_a_row_of_nan_stays_in_its_row(device):
    x = torch.randn(8, 128, device=device)
    x[3] = float("nan")
    assert rms_norm(x, torch.ones(128, device=device), 1e-6).isnan().all(-1).tolist() == [row == 3 for row in range(8)]
