"""Products of few rows: against fp64, with and without what is fused into them, at odd sizes."""

import pytest
import torch

from minisgl.kernel import reference
from minisgl.kernel.gpu.linear import LinearConfig, is_faster, linear, linear_config, norm_linear

SIZES = [(1, 8, 16), (2, 5, 24), (3, 12, 100), (4, 7, 1100)]
"""rows, outputs, inputs"""
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def randn(*shape, dtype, device):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


def close(found, expected, dtype):
    scale = expected.abs().max()
    assert float((found.double() - expected).abs().max() / scale) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(device, rows, outputs, inputs, has_bias, dtype):
    x, weight = randn(rows, inputs, dtype=dtype, device=device), randn(outputs, inputs, dtype=dtype, device=device)
    bias = randn(outputs, dtype=dtype, device=device) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    close(linear(x, weight, bias), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_gated(device, rows, outputs, inputs, dtype):
    x = randn(rows, inputs, dtype=dtype, device=device) * 0.3
    weight = randn(2 * outputs, inputs, dtype=dtype, device=device) * 0.1
    product = x.double() @ weight.double().T
    close(linear(x, weight, is_gated=True), reference.silu_mul(product), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_norm_linear(device, rows, outputs, inputs, is_gated, dtype):
    x, residual = (randn(rows, inputs, dtype=dtype, device=device) for _ in range(2))
    gain, weight = randn(inputs, dtype=dtype, device=device), randn(2 * outputs, inputs, dtype=dtype, device=device) * 0.1
    total = (x + residual).double()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    product = normed @ weight.double().T
    found, found_total = norm_linear(x, residual, (gain, 1e-5), weight, is_gated=is_gated)
    assert torch.equal(found_total, x + residual)
    close(found, reference.silu_mul(product) if is_gated else product, dtype)


def test_rows_of_a_larger_tensor(device):
    """A slice's rows lie further apart than they are long."""
    wide = randn(3, 40, dtype=torch.float32, device=device)
    weight = randn(6, 16, dtype=torch.float32, device=device)
    close(linear(wide[:, 8:24], weight), wide[:, 8:24].double() @ weight.double().T, torch.float32)


def test_a_row_gives_the_same_bits_alone_and_in_company(device):
    x, weight = randn(4, 48, dtype=torch.float32, device=device), randn(9, 48, dtype=torch.float32, device=device)
    together = linear(x, weight)
    assert all(torch.equal(linear(x[row : row + 1], weight)[0], together[row]) for row in range(4))


def test_every_program_size_gives_the_same(device):
    x, weight = randn(2, 64, dtype=torch.float32, device=device), randn(24, 64, dtype=torch.float32, device=device)
    expected = linear(x, weight, config=LinearConfig(1, 64))
    for block_n in (2, 4, 8, 16):
        torch.testing.assert_close(linear(x, weight, config=LinearConfig(block_n, 64)), expected, rtol=1e-6, atol=1e-6)


def test_the_configuration_is_the_measured_one():
    assert linear_config(1024) == linear_config(1024, is_gated=True) == LinearConfig(4, 1024, 4)
    assert linear_config(2048) == LinearConfig(2, 2048, 4)
    assert linear_config(3072) == LinearConfig(2, 4096, 8)
    assert linear_config(5120) == LinearConfig(4, 512, 2)
    assert linear_config(5) == LinearConfig(4, 8, 1)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("inputs", [24, 1024, 2048, 3072, 4095, 5120, 17408])
def test_the_sums_of_any_number_of_tokens_fit_into_registers(inputs, num_tokens, is_gated):
    config = linear_config(inputs, num_tokens, is_gated)
    rows = 1 << (num_tokens - 1).bit_length()
    assert rows * (1 + is_gated) * config.block_n * config.block_k <= 64 * 32 * config.num_warps


def test_the_library_serves_long_rows_and_many_tokens():
    assert is_faster(4, 3072, True)
    assert not is_faster(5, 1024, False)
    assert is_faster(1, 5120, False)
    assert not is_faster(1, 5120, True)
    assert not is_faster(2, 17408, False)
