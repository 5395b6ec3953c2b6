"""The fused q/k-norm, rotation and K/V write against its three twins and fp64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from minisgl.kernel import reference
from minisgl.kernel.gpu.rope import rope_and_store


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_tokens: int = 2


CASES = [Case(16, 8, 128, 64), Case(5, 1, 80, 1), Case(9, 3, 64, 16), Case(4, 4, 2, 3), Case(20, 10, 6, 5), Case(2, 1, 256, 16, 1)]


def make_inputs(case, dtype, device, has_norms):
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = (torch.randn(case.num_tokens, width, device=device) * 2).to(dtype)
    angles = torch.rand(case.num_tokens, case.head_dim // 2, device=device) * 6
    gains = [torch.randn(case.head_dim, device=device).to(dtype) for _ in range(2)]
    slots = torch.randperm(7 * case.page_size, device=device)[: case.num_tokens]
    return qkv, angles.cos().to(dtype), angles.sin().to(dtype), (*gains, 1e-6) if has_norms else None, slots


def nan_pools(case, dtype, device):
    return [torch.full((7, case.num_kv_heads, case.page_size, case.head_dim), float("nan"), dtype=dtype, device=device) for _ in range(2)]


def unfused(case, qkv, cos, sin, norms, pools, slots):
    """The same by the twins; for fp64 inputs the same in fp64 but for the norm's statistics."""
    heads = qkv.view(len(qkv), -1, case.head_dim)
    q, k, v = heads.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    if norms:
        q, k = (reference.rms_norm(x, gain, norms[2]) for x, gain in zip((q, k), norms[:2], strict=True))
    q, k = (reference.apply_rope(x.contiguous(), cos, sin) for x in (q, k))
    reference.store_kv(pools[0], k, slots)
    reference.store_kv(pools[1], v, slots)
    return q


def close(out, twin, dtype):
    """NaN where nothing was written on both sides; equal but for few values whose rounding the order of a sum moved."""
    assert torch.equal(out.isnan(), twin.isnan())
    written = ~twin.isnan()
    out, twin = out[written], twin[written]
    largest = float(twin.abs().max())
    if dtype == torch.float32:
        torch.testing.assert_close(out, twin, rtol=1e-6, atol=1e-6 * largest)
    else:
        torch.testing.assert_close(out, twin, rtol=1e-2, atol=1e-2 * largest)
        assert int((out != twin).sum()) <= max(4, out.numel() // 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_and_store(device, case, has_norms, dtype):
    inputs = make_inputs(case, dtype, device, has_norms)
    *others, slots = inputs
    pools, twins = nan_pools(case, dtype, device), nan_pools(case, dtype, device)
    q = rope_and_store(*others, *pools, slots)
    expected = unfused(case, *others, twins, slots)
    assert (q.shape, q.dtype, q.is_contiguous()) == (expected.shape, dtype, True)
    close(q, expected, dtype)
    close(pools[0], twins[0], dtype)
    assert torch.equal(pools[1].nan_to_num(9e3), twins[1].nan_to_num(9e3))
    if not has_norms and dtype != torch.float32:
        assert torch.equal(q, expected), "without a sum every rounding is fixed"
        assert torch.equal(pools[0].nan_to_num(9e3), twins[0].nan_to_num(9e3))


def test_against_complex_numbers_in_fp64(device):
    case = Case(3, 2, 64, 16, 5)
    qkv, cos, sin, (q_gain, k_gain, eps), slots = make_inputs(case, torch.float32, device, True)
    pools = nan_pools(case, torch.float32, device)
    q = rope_and_store(qkv, cos, sin, (q_gain, k_gain, eps), *pools, slots)
    heads = qkv.double().view(5, -1, 64)[:, :5]
    heads = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt()
    heads = heads * torch.cat((q_gain.expand(3, 64), k_gain.expand(2, 64))).double()
    turned = torch.complex(heads[..., :32], heads[..., 32:]) * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(q.double(), expected[:, :3], rtol=1e-6, atol=5e-6)
    k = pools[0].transpose(1, 2).reshape(-1, 2, 64)[slots]
    torch.testing.assert_close(k.double(), expected[:, 3:], rtol=1e-6, atol=5e-6)


def test_slots_of_32_bits_and_pools_in_another_order(device):
    """Pools that are strided views of [P, page_size, K, D]."""
    case = Case(4, 2, 16, 4, 6)
    *others, slots = make_inputs(case, torch.float32, device, True)
    pools = [torch.zeros(7, 4, 2, 16, device=device).transpose(1, 2) for _ in range(2)]
    twins = [torch.zeros(7, 2, 4, 16, device=device) for _ in range(2)]
    q = rope_and_store(*others, *pools, slots.int())
    torch.testing.assert_close(q, rope_and_store(*others, *twins, slots), rtol=0, atol=0)
    assert all(torch.equal(pool, twin) for pool, twin in zip(pools, twins, strict=True))
    assert all(pool.any() for pool in pools)
