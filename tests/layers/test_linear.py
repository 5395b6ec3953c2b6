"""Matrix products, plain and packed, against float64."""

import os
import subprocess
import sys

import pytest
import torch

from minisgl.distributed import DistributedInfo
from minisgl.kernel.packed import can_pack, pack, packed_linear
from minisgl.layers.base import Spec
from minisgl.layers.linear import FusedLinear, Linear, linear

CPU = torch.device("cpu")
SHAPES = [(1, 1), (3, 5), (64, 7), (576, 192), (1003, 33)]


def spec(dtype=torch.float32):
    return Spec(dtype, CPU, DistributedInfo(0, 1))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_products_equal_float64(out_size, in_size, has_bias):
    generator = torch.Generator().manual_seed(out_size)
    weight = torch.randn(out_size, in_size, generator=generator)
    bias = torch.randn(out_size, generator=generator) if has_bias else None
    packed = pack(weight)
    for num_rows in (1, 2, 3, 8, 31, 64, 65, 256, 300):
        x = torch.randn(num_rows, in_size, generator=generator)
        exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        bound = 1e-6 * in_size**0.5 * 8
        assert (linear(x, weight, bias) - exact).abs().max() < bound
        result = packed_linear(x, packed, bias)
        assert result.is_contiguous()
        assert (result - exact).abs().max() < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_packed(dtype):
    layer = Linear(4, 4, False, spec(dtype))
    layer.pack()
    assert not can_pack(dtype, CPU)
    assert set(layer.state_dict()) == {"weight"}


def test_without_onednn_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    layer = Linear(4, 4, False, spec())
    layer.pack()
    assert set(layer.state_dict()) == {"weight"}


def test_a_packed_layer_computes_the_same_and_has_no_matrix_to_load():
    fused = FusedLinear(6, {"q": 4, "k": 2}, True, spec())
    for tensor in fused.state_dict().values():
        tensor.normal_()
    x = torch.randn(5, 6)
    before = fused.forward(x)
    fused.pack()
    assert torch.allclose(fused.forward(x), before, atol=1e-5)
    assert fused.state_dict() == {}


ALL_ROW_COUNTS = """
import torch
from minisgl.kernel.packed import pack, packed_linear

def private_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

packed = pack(torch.zeros(1024, 256))
packed_linear(torch.zeros(1, 256), packed)
before = private_kib()
for num_rows in (*range(1, 257), *range(1, 257)):
    packed_linear(torch.zeros(num_rows, 256), packed)
print(private_kib() - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
def test_each_number_of_rows_kept_half_a_megabyte_for_each_matrix_shape():
    done = subprocess.run([sys.executable, "-c", ALL_ROW_COUNTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 1024, f"{done.stdout} KiB more; with a number of rows each it is about 180,000"
