"""Which products go to a named algorithm of cuBLASLt, and that all others are torch's; tests/gpu/test_products.py runs the algorithms."""

from __future__ import annotations

import json
import logging
from importlib import resources

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel import products
from minisgl.kernel.products import ATTRIBUTES, product

TABLE = json.loads(resources.files("minisgl.kernel").joinpath("products.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    caches = products._named, products._prepared, products.library
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


class Named:
    """Stands for the library and its products: says what it is asked for."""

    version = TABLE["cublaslt"]

    def __init__(self):
        self.asked, self.is_refusing = [], False

    def make(self, *arguments):
        if self.is_refusing:
            raise RuntimeError("cublasLtMatmulAlgoCheck returned status 15")
        self.asked.append(arguments)
        return lambda x, weight: torch.full((len(x), len(weight)), 7.0, dtype=x.dtype)


@pytest.fixture
def named(monkeypatch):
    found = Named()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: TABLE["device"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU's device
    monkeypatch.setattr(products, "library", lambda: found)
    products.library.cache_clear = lambda: None
    monkeypatch.setattr(products, "Product", found.make)
    return found


def test_the_table_names_each_product_once_and_each_algorithm_by_all_its_numbers():
    assert TABLE["algorithms"]
    assert all(len(entry) == 3 + len(ATTRIBUTES) for entry in TABLE["algorithms"])
    sizes = [tuple(entry[:3]) for entry in TABLE["algorithms"]]
    assert len(set(sizes)) == len(sizes)


def test_a_product_in_the_table_is_computed_by_its_algorithm(named):
    sizes, attributes = tuple(TABLE["algorithms"][0][:3]), TABLE["algorithms"][0][3:]
    x, weight = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((sizes[0], sizes[2]), sizes[1:]))
    for _ in range(2):
        assert bool((product(x, weight) == 7).all())
    assert named.asked == [(*sizes, attributes)], "prepared once"


def test_what_the_table_does_not_name_is_left_to_torch(named):
    (tokens, outputs, num_inputs), bf16 = TABLE["algorithms"][0][:3], torch.bfloat16
    for shape, dtype, bias in (((tokens, 24), bf16, None), ((tokens, num_inputs), torch.float32, None), ((tokens, num_inputs), bf16, 1)):
        x, weight = torch.ones(shape, dtype=dtype), torch.ones(outputs if shape[1] != 24 else 5, shape[1], dtype=dtype)
        added = None if bias is None else torch.ones(len(weight), dtype=dtype)
        assert torch.equal(product(x, weight, added), F.linear(x, weight, added))
    wide = torch.ones(tokens, 2 * num_inputs, dtype=bf16)[:, :num_inputs]
    shifted = torch.ones(tokens * num_inputs + 1, dtype=bf16)[1:].view(tokens, num_inputs)
    batches = torch.ones(tokens, 2, num_inputs, dtype=bf16)
    for x in (wide, shifted, batches):  # rows that are not one after the other, no multiple of 16 bytes, more than rows
        assert torch.equal(product(x, weight), F.linear(x, weight))
    for x, other in ((torch.ones(tokens, 24, dtype=bf16), weight), (torch.ones(tokens, num_inputs, dtype=bf16), weight.float())):
        with pytest.raises(RuntimeError):  # torch's own refusal
            product(x, other)
    assert named.asked == []


def test_a_thread_whose_device_is_another_is_left_to_torch(named, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tokens, outputs, num_inputs = TABLE["algorithms"][0][:3]
    x, weight = torch.ones(tokens, num_inputs, dtype=torch.bfloat16), torch.ones(outputs, num_inputs, dtype=torch.bfloat16)
    assert torch.equal(product(x, weight), F.linear(x, weight))
    assert named.asked == []


def test_an_algorithm_that_the_library_refuses_is_left_to_torch(named, caplog):
    named.is_refusing = True
    tokens, outputs, num_inputs = TABLE["algorithms"][0][:3]
    x, weight = torch.ones(tokens, num_inputs, dtype=torch.bfloat16), torch.ones(outputs, num_inputs, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert all(torch.equal(product(x, weight), F.linear(x, weight)) for _ in range(2))
    (record,) = caplog.records
    refusal = "cublasLtMatmulAlgoCheck returned status 15"
    assert record.getMessage() == f"the product of {tokens} tokens by a matrix of {outputs} x {num_inputs} is left to torch: {refusal}"


@pytest.mark.parametrize(("name", "version"), [("NVIDIA A100", TABLE["cublaslt"]), (TABLE["device"], TABLE["cublaslt"] + 1)])
def test_another_gpu_or_library_than_was_measured_is_left_to_torch(named, monkeypatch, name, version):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    named.version = version
    tokens, outputs, num_inputs = TABLE["algorithms"][0][:3]
    x, weight = torch.ones(tokens, num_inputs, dtype=torch.bfloat16), torch.ones(outputs, num_inputs, dtype=torch.bfloat16)
    assert torch.equal(product(x, weight), F.linear(x, weight))
    assert named.asked == []


def test_a_machine_without_the_library_says_so_once_and_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: TABLE["device"])
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    x, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(3, 8, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert all(torch.equal(product(x, weight), F.linear(x, weight)) for _ in range(2))
    (record,) = caplog.records
    assert record.getMessage().startswith("cuBLASLt cannot be used directly, matrix products are left to torch: libcublasLt.so.0")
