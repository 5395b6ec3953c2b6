"""Every algorithm that the table names, on the GPU that it was measured on: right, inside and outside of a graph."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel import products
from minisgl.kernel.products import Product, product

TABLE = json.loads(resources.files("minisgl.kernel").joinpath("products.json").read_text(encoding="utf-8"))
pytestmark = pytest.mark.gpu


def measured_device():
    """The current one, if the table is for it and for this version of the library; without the library there is an error, no skip."""
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_name(device) != TABLE["device"] or products.library().version != TABLE["cublaslt"]:
        pytest.skip(f"measured on {TABLE['device']} with cuBLASLt {TABLE['cublaslt']}")
    assert products._named(device)
    return device


def test_every_named_algorithm_is_taken_and_right():
    device = measured_device()
    weights = {}
    for tokens, outputs, inputs, *_ in TABLE["algorithms"]:
        if (outputs, inputs) not in weights:
            weights = {(outputs, inputs): torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * 0.02}
        weight, x = weights[outputs, inputs], torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
        assert products._prepared(device, (tokens, outputs, inputs)) is not None
        out = product(x, weight)
        rows = torch.randperm(tokens, device=device)[:64]
        exact = x[rows].double() @ weight[:4096].double().T
        assert float((out[rows, :4096].double() - exact).abs().max() / exact.abs().max()) < 1e-2
        torch.testing.assert_close(out, F.linear(x, weight), rtol=2e-2, atol=2e-2 * float(exact.abs().max()))
        assert torch.equal(product(x, weight), out), "the same bits each time"


def test_a_graph_holds_named_algorithms_with_their_scratch_memory():
    device = measured_device()
    tokens, outputs, inputs, *_ = next(entry for entry in TABLE["algorithms"] if entry[5] > 1)  # one that splits its inputs
    weight, x = torch.randn(outputs, inputs, device=device).bfloat16(), torch.randn(tokens, inputs, device=device).bfloat16()
    expected = product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [product(x, weight) for _ in range(3)]
    for out in outs:
        out.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(out, expected) for out in outs)


def test_an_algorithm_that_is_none_is_an_error():
    with pytest.raises(RuntimeError, match=r"cublasLt\w+ returned status"):
        Product(8, 64, 64, [9999, 20, 1, 0, 0, 0, 35, 0, 2])
