"""The mixture of experts: routing and the sum of experts against fp64 and the twins, at odd sizes and uneven shares.

Whatever the kernels allocate holds NaN, or 0 where it is a number of a pair or an expert, before it is written.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minisgl.errors import ConfigError
from minisgl.kernel import reference
from minisgl.kernel.gpu.moe import MoEKernelConfig, experts, moe_config, route
from minisgl.moe import MOE_BACKENDS, default_moe_backend, moe_backend

NAN = float("nan")
LARGE, SMALL = 227 * 1024, 99 * 1024
"""Shared memory of a program on sm_90 and on sm_89."""
slow = pytest.mark.slow
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest error allowed, relative to the largest value of the exact result."""
SIZES = [(1, 32, 48, 8, 2), (3, 64, 40, 5, 3), (2, 48, 24, 64, 8), (70, 64, 33, 4, 2)]
SIZES += [pytest.param(150, 40, 96, 6, 3, marks=slow), pytest.param(290, 32, 16, 4, 4, marks=slow)]
"""tokens, hidden, width, experts, experts per token"""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    def fill(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(NAN if tensor.is_floating_point() else 0)

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, fill(getattr(owner, name)))


def randn(*shape, dtype, device):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


def layer(tokens, hidden, width, num_experts, dtype, device):
    """Inputs and matrices."""
    x = randn(tokens, hidden, dtype=dtype, device=device)
    gate_up = randn(num_experts, 2 * width, hidden, dtype=torch.float64, device=device) / hidden**0.5
    down = randn(num_experts, hidden, width, dtype=torch.float64, device=device) / width**0.5
    return x, gate_up.to(dtype), down.to(dtype)


def chosen(tokens, num_experts, num_chosen, device):
    """Weights that do not sum to 1, and distinct ids."""
    ids = torch.stack([torch.randperm(num_experts)[:num_chosen] for _ in range(tokens)])
    return torch.rand(tokens, num_chosen).to(device), ids.to(device)


def exact(x, gate_up, down, weights, ids):
    """In fp64, every expert for every token."""
    gate, up = torch.einsum("th,eih->tei", x.double(), gate_up.double()).chunk(2, dim=-1)
    each = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down.double())
    shares = torch.zeros(len(x), len(down), dtype=torch.float64, device=x.device).scatter_add_(1, ids, weights.double())
    return torch.einsum("teh,te->th", each, shares)


def check(found, inputs):
    expected, twin = exact(*inputs), reference.experts(*inputs)
    dtype = inputs[0].dtype
    assert found.dtype == dtype
    scale = expected.abs().max()
    assert float((found.double() - expected).abs().max() / scale) < TOLERANCE[dtype]
    assert float((found.double() - twin.double()).abs().max() / scale) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_renormalised", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "num_chosen"), [(1, 4, 2), (7, 8, 8), (20, 37, 5), (9, 128, 8), (5, 6, 1)])
def test_route(device, tokens, num_experts, num_chosen, is_renormalised, dtype):
    distinct = torch.stack([torch.randperm(num_experts) for _ in range(tokens)]) * 0.25 - num_experts / 8
    logits = distinct.to(dtype).to(device)
    weights, ids = route(logits, num_chosen, is_renormalised)
    twin_weights, twin_ids = reference.route(logits, num_chosen, is_renormalised)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert torch.equal(ids, twin_ids)
    torch.testing.assert_close(weights, twin_weights, rtol=1e-5, atol=1e-7)
    probs = logits.double().softmax(-1).gather(1, ids)
    expected = probs / probs.sum(-1, keepdim=True) if is_renormalised else probs
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_lowest_are_chosen(device):
    """The twin promises no order among them; the weights are the same whichever it takes."""
    logits = torch.randint(-2, 2, (40, 24)).float().to(device)
    weights, ids = route(logits, 6, True)
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :6])
    torch.testing.assert_close(weights, reference.route(logits, 6, True)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_logits_that_are_not_finite_lead_to_experts_that_exist(device, bad):
    logits = torch.randn(4, 6)
    logits[1, 3], logits[2] = bad, bad
    with np.errstate(invalid="ignore"):  # of the interpreter
        weights, ids = route(logits.to(device), 4, True)
    twin, _ = reference.route(logits, 4, True)
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in ids.tolist())
    assert torch.equal(weights.isnan().any(1).cpu(), twin.isnan().any(1))


def test_rows_of_a_larger_tensor(device):
    wide = torch.randn(5, 40, device=device)
    assert torch.equal(route(wide[:, 8:24], 3, True)[1], reference.route(wide[:, 8:24].contiguous(), 3, True)[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "hidden", "width", "num_experts", "num_chosen"), SIZES)
def test_experts(device, tokens, hidden, width, num_experts, num_chosen, dtype):
    inputs = *layer(tokens, hidden, width, num_experts, dtype, device), *chosen(tokens, num_experts, num_chosen, device)
    check(experts(*inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)])
@pytest.mark.parametrize("share", ["all on one", "one without tokens", "the last alone has a full block", "only the first and last"])
def test_uneven_shares(device, share, dtype):
    tokens, num_experts = 48, 5
    ids = {
        "all on one": torch.full((tokens, 1), 3),
        "one without tokens": torch.tensor([0, 1, 3, 4]).repeat(12).unsqueeze(1),
        "the last alone has a full block": torch.tensor([0, 1] + [4] * 46).unsqueeze(1),
        "only the first and last": torch.tensor([[0, 4]] * tokens),
    }[share].to(device)
    inputs = *layer(tokens, 32, 48, num_experts, dtype, device), torch.rand(ids.shape).to(device), ids
    check(experts(*inputs), inputs)


def test_no_token(device):
    inputs = *layer(0, 32, 48, 4, torch.float32, device), *(t[:0] for t in chosen(1, 4, 2, device))
    assert experts(*inputs).shape == (0, 32)
    assert [t.shape for t in route(torch.zeros(0, 4, device=device), 2, True)] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_m", [16, pytest.param(32, marks=slow), pytest.param(64, marks=slow), 128])
def test_every_size_of_block(device, block_m, dtype):
    inputs = *layer(40, 48, 40, 4, dtype, device), *chosen(40, 4, 2, device)
    check(experts(*inputs, config=MoEKernelConfig(block_m, 64, 32, 2, 4)), inputs)


@pytest.mark.parametrize("tokens", [2, 40])
def test_the_same_call_gives_the_same_bits(device, tokens):
    inputs = *layer(tokens, 32, 24, 8, torch.float32, device), *chosen(tokens, 8, 2, device)
    assert torch.equal(experts(*inputs), experts(*inputs))


def test_the_configuration_follows_the_pairs_of_an_expert():
    blocks = {tokens: moe_config(8 * tokens, 128, torch.bfloat16, LARGE).block_m for tokens in (1, 8, 32, 128, 256, 1024, 2048, 8192)}
    assert blocks == {1: 16, 8: 16, 32: 16, 128: 16, 256: 32, 1024: 64, 2048: 128, 8192: 128}
    assert moe_config(8 * 8192, 128, torch.float32, LARGE).block_m == 16
    assert moe_config(8 * 8192, 128, torch.bfloat16, SMALL).block_m == 64


@pytest.mark.parametrize("name", MOE_BACKENDS)
def test_every_backend_computes_the_same(device, name):
    backend = moe_backend(name)
    x, gate_up, down = layer(12, 32, 48, 6, torch.float32, device)
    logits = torch.randn(12, 6).to(device)
    inputs = x, gate_up, down, *backend.route(logits, 2, True)
    assert torch.equal(inputs[4], reference.route(logits, 2, True)[1])
    check(backend.experts(*inputs), inputs)


def test_backends_by_name_and_by_device():
    with pytest.raises(ConfigError, match="torch, triton"):
        moe_backend("cutlass")
    assert default_moe_backend(torch.device("cpu")) == moe_backend("torch")
    assert default_moe_backend(torch.device("cuda")) == moe_backend("triton")
    assert [moe_backend(name).supports_graphs for name in ("torch", "triton")] == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_a_graph_follows_the_router(device, tokens):
    """Captured once, replayed with other tokens that choose other experts."""
    x, gate_up, down = layer(tokens, 256, 96, 32, torch.bfloat16, device)
    logits = torch.randn(tokens, 32, device=device)

    def compute():
        return experts(x, gate_up, down, *route(logits, 4, True))

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    for number in range(3):
        logits.copy_(torch.randn(tokens, 32))
        logits[:, number] += 20
        x.copy_(torch.randn(tokens, 256))
        graph.replay()
        check(found, (x, gate_up, down, *route(logits, 4, True)))
