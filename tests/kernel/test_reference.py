"""The kernels' twins against the same formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel import reference

TYPES = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Type -> tolerance for values of size 1 to 8."""


@pytest.fixture
def noise():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def norm64(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_rms_norm(noise, dtype, eps):
    x, weight = noise(7, 96).to(dtype), noise(96).to(dtype)
    out = reference.rms_norm(x, weight, eps)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), norm64(x, weight, eps), rtol=0, atol=TYPES[dtype])


def test_rms_norm_of_heads_and_of_extremes(noise):
    x = noise(5, 3, 16)
    torch.testing.assert_close(reference.rms_norm(x, torch.ones(16), 1e-6).double(), norm64(x, torch.ones(16), 1e-6), rtol=0, atol=1e-5)
    large = (noise(2, 64) * 3000).half()
    assert bool(reference.rms_norm(large, torch.ones(64).half(), 1e-6).isfinite().all()), "squares overflow fp16, not fp32"
    assert torch.equal(reference.rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-6), torch.zeros(1, 8))


def test_add_rms_norm(noise):
    x, residual, weight = noise(4, 32), noise(4, 32), noise(32)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), norm64(x + residual, weight, 1e-6), rtol=0, atol=1e-5)


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80])
def test_apply_rope_turns_pairs_of_halves(noise, head_dim):
    x, angles = noise(5, 3, head_dim), noise(5, head_dim // 2)
    out = reference.apply_rope(x, angles.cos(), angles.sin())
    half = head_dim // 2
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = numbers * torch.polar(torch.ones_like(angles).double(), angles.double()).unsqueeze(1)
    torch.testing.assert_close(out.double(), torch.cat((turned.real, turned.imag), -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_silu_mul(noise, dtype):
    gate_up = noise(6, 40).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(reference.silu_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, rtol=0.02, atol=TYPES[dtype])


@pytest.mark.parametrize(
    "blocks", [[(0, 1003)], [(0, 502), (502, 1003)], [(0, 251), (251, 502), (502, 753), (753, 1003)], [(0, 1003), (1003, 1003)]]
)
def test_vocab_embedding_blocks_add_up(noise, blocks):
    weight, ids = noise(1003, 8), torch.tensor([0, 1, 250, 251, 501, 502, 753, 1002])
    parts = [reference.vocab_embedding(ids, weight[first:end], first) for first, end in blocks]
    assert torch.equal(torch.stack(parts).sum(0), weight[ids])
    assert all(part.shape == (8, 8) for part in parts)


@pytest.mark.parametrize("page_size", [1, 16])
def test_store_kv_writes_exactly_the_slots(noise, page_size):
    pool, values = torch.zeros(6, 2, page_size, 4), noise(3, 2, 4)
    slots = torch.tensor([5 * page_size, 2 * page_size + page_size - 1, 0])
    reference.store_kv(pool, values, slots)
    flat = pool.transpose(1, 2).reshape(-1, 2, 4)
    assert torch.equal(flat[slots], values)
    flat[slots] = 0
    assert not flat.any()


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_paged_attention(noise, heads):
    """Rows in scattered pages, cached and not, against dense attention; unused slots hold large garbage."""
    num_heads, num_kv_heads = heads
    cached, extend, page_size, head_dim = [0, 9, 16], [5, 1, 3], 4, 12
    k_pool, v_pool = (noise(20, num_kv_heads, page_size, head_dim) * 1e4 for _ in range(2))
    pages = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:15].view(3, 5).int()
    q, expected = noise(sum(extend), num_heads, head_dim), []
    for row in range(3):
        length = cached[row] + extend[row]
        k, v = noise(length, num_kv_heads, head_dim), noise(length, num_kv_heads, head_dim)
        slots = torch.tensor([int(pages[row, i // page_size]) * page_size + i % page_size for i in range(length)])
        reference.store_kv(k_pool, k, slots)
        reference.store_kv(v_pool, v, slots)
        k, v = (t.double().repeat_interleave(num_heads // num_kv_heads, 1) for t in (k, v))
        start = sum(extend[:row])
        for index in range(extend[row]):
            seen = cached[row] + index + 1
            scores = torch.einsum("hd,lhd->hl", q[start + index].double(), k[:seen]) * 0.3
            expected.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v[:seen]))
    out = reference.paged_attention(q, k_pool, v_pool, pages, cached, extend, 0.3)
    torch.testing.assert_close(out.double(), torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_renormalised", [False, True])
@pytest.mark.parametrize("top", [1, 3, 5])
def test_route(noise, top, is_renormalised):
    logits = noise(40, 5) * 3
    weights, ids = reference.route(logits, top, is_renormalised)
    for token in range(40):
        probs = logits[token].double().softmax(-1)
        likeliest = sorted(range(5), key=lambda expert: -float(probs[expert]))[:top]
        assert ids[token].tolist() == likeliest
        own = probs[likeliest] / (probs[likeliest].sum() if is_renormalised else 1)
        torch.testing.assert_close(weights[token].double(), own, rtol=0, atol=1e-6)


def test_route_of_half_types_is_computed_in_fp32(noise):
    logits = noise(9, 8).bfloat16()
    weights, _ = reference.route(logits, 2, True)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(9), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
def test_experts(noise, dtype):
    """Some experts get no token, one gets most."""
    x = noise(11, 8).to(dtype)
    gate_up, down = ((noise(*shape) / math.sqrt(shape[-1])).to(dtype) for shape in ((6, 20, 8), (6, 8, 10)))
    ids = torch.tensor([[0, 5]] * 6 + [[5, 2]] * 5)
    weights = noise(11, 2).softmax(-1)
    expected = torch.zeros(11, 8, dtype=torch.float64)
    for token in range(11):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    out = reference.experts(x, gate_up, down, weights, ids)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TYPES[dtype])
