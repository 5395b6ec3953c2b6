"""The contract of BaseOP: which fields are parameters, under which names, and what loading refuses."""

from __future__ import annotations

import pytest
import torch

from minisgl.distributed import DistributedInfo
from minisgl.errors import ConfigError, ModelFormatError
from minisgl.layers.base import BaseOP, OPList, Spec
from minisgl.layers.embedding import LMHead, VocabEmbedding
from minisgl.layers.linear import FusedLinear, Linear, RowLinear, divide, linear
from minisgl.layers.mlp import GatedMLP, MoEConfig, SparseMLP
from minisgl.layers.norm import RMSNorm

SPEC = Spec(torch.float32, torch.device("cpu"), DistributedInfo(0, 1))


class Inner(BaseOP):
    def __init__(self) -> None:
        self.weight = torch.zeros(2, 3)
        self._scratch = torch.zeros(9)
        self.name = "not a tensor"

    def forward(self):
        return self.weight


class Outer(BaseOP):
    def __init__(self) -> None:
        self.bias = torch.zeros(4)
        self.first = Inner()
        self.rows = OPList([Inner(), Inner()])
        self._hidden = Inner()

    def forward(self):
        return self.bias


NAMES = {"bias", "first.weight", "rows.0.weight", "rows.1.weight"}


def test_tensor_fields_are_parameters_and_nested_layers_extend_the_prefix():
    assert set(Outer().state_dict()) == NAMES
    assert set(Outer().state_dict(prefix="model.")) == {f"model.{name}" for name in NAMES}


def test_the_result_is_added_to_what_is_given():
    given = {"other": torch.zeros(1)}
    assert Outer().state_dict(result=given) is given
    assert set(given) == NAMES | {"other"}


def test_the_tensors_are_the_layers_own():
    layer = Outer()
    layer.state_dict()["rows.1.weight"].fill_(5)
    assert [float(inner.weight.sum()) for inner in layer.rows] == [0, 30]


def test_loading_copies_values_and_converts_types():
    layer = Outer()
    given = {name: torch.full(tensor.shape, 2.0, dtype=torch.bfloat16) for name, tensor in layer.state_dict().items()}
    field = layer.first.weight
    layer.load_state_dict(given)
    assert layer.first.weight is field
    assert all(bool((tensor == 2).all()) and tensor.dtype == torch.float32 for tensor in layer.state_dict().values())


def test_loading_under_a_prefix():
    layer = Outer()
    layer.load_state_dict({f"a.{name}": torch.ones_like(tensor) for name, tensor in layer.state_dict().items()}, prefix="a.")
    assert bool((layer.bias == 1).all())


@pytest.mark.parametrize(
    ("remove", "add", "message"),
    [
        ("first.weight", None, "1 missing: first.weight$"),
        (None, "first.scale", "1 unexpected: first.scale$"),
        ("bias", "biases", "1 missing: bias; 1 unexpected: biases"),
    ],
)
def test_missing_and_unexpected_names_are_listed_and_nothing_is_copied(remove, add, message):
    layer = Outer()
    given = {name: torch.ones_like(tensor) for name, tensor in layer.state_dict().items() if name != remove}
    given |= {} if add is None else {add: torch.ones(1)}
    with pytest.raises(ModelFormatError, match=message):
        layer.load_state_dict(given)
    assert not any(tensor.any() for tensor in layer.state_dict().values())


def test_another_shape_is_named_with_both_and_nothing_is_copied():
    layer = Outer()
    given = {name: torch.ones_like(tensor) for name, tensor in layer.state_dict().items()} | {"rows.1.weight": torch.ones(3, 2)}
    with pytest.raises(ModelFormatError, match=r"rows.1.weight: shape \[3, 2\] found, the model's config asks for \[2, 3\]"):
        layer.load_state_dict(given)
    assert not any(tensor.any() for tensor in layer.state_dict().values())


def test_a_layer_must_say_how_it_computes():
    with pytest.raises(TypeError, match="abstract"):
        BaseOP()


def test_a_list_of_layers_is_iterated_not_called():
    layers = OPList([Inner(), Inner()])
    assert len(list(layers)) == 2
    with pytest.raises(NotImplementedError):
        layers.forward()


def test_fused_matrices_keep_their_names_and_their_place():
    fused = FusedLinear(3, {"q_proj": 4, "k_proj": 2, "v_proj": 2}, True, SPEC)
    parts = fused.state_dict(prefix="attn.")
    assert {name: tuple(tensor.shape) for name, tensor in parts.items()} == {
        "attn.q_proj.weight": (4, 3),
        "attn.q_proj.bias": (4,),
        "attn.k_proj.weight": (2, 3),
        "attn.k_proj.bias": (2,),
        "attn.v_proj.weight": (2, 3),
        "attn.v_proj.bias": (2,),
    }
    for number, tensor in enumerate(parts.values()):
        tensor.fill_(number + 1)
    x = torch.ones(1, 3)
    assert fused.forward(x).tolist() == [[1 * 3 + 2] * 4 + [3 * 3 + 4] * 2 + [5 * 3 + 6] * 2]


def test_names_of_the_other_layers():
    assert set(Linear(3, 4, False, SPEC).state_dict()) == {"weight"}
    assert set(RowLinear(3, 4, True, SPEC).state_dict()) == {"weight", "bias"}
    assert set(RMSNorm(4, 1e-6, SPEC).state_dict()) == {"weight"}
    assert set(GatedMLP(4, 6, False, SPEC).state_dict()) == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    embedding = VocabEmbedding(10, 4, SPEC)
    assert set(LMHead(10, 4, SPEC, None).state_dict()) == {"weight"}
    assert set(LMHead(10, 4, SPEC, embedding).state_dict()) == set()
    moe = MoEConfig(2, 1, 6, is_renormalised=True, sparse_step=1, dense_layers=frozenset())
    shapes = {name: tuple(tensor.shape) for name, tensor in SparseMLP(4, moe, SPEC).state_dict().items()}
    assert shapes == {"gate.weight": (2, 4)} | {
        f"experts.{expert}.{name}_proj.weight": shape
        for expert in range(2)
        for name, shape in {"gate": (6, 4), "up": (6, 4), "down": (4, 6)}.items()
    }


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_same_for_every_row_count(count, has_bias):
    """Row counts choose between two ways to compute it."""
    generator = torch.Generator().manual_seed(count)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((count, 40), (24, 40), (24,)))
    out = linear(x, weight, bias if has_bias else None)
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_an_uneven_split_names_the_numbers():
    assert divide(12, 4, "things") == 3
    with pytest.raises(ConfigError, match="10 things cannot be split evenly over 4 ranks; choose another --tp"):
        divide(10, 4, "things")


@pytest.mark.parametrize(
    ("config", "sparse"),
    [
        (MoEConfig(4, 2, 8, True, 1, frozenset()), [0, 1, 2, 3, 4, 5]),
        (MoEConfig(4, 2, 8, True, 2, frozenset()), [1, 3, 5]),
        (MoEConfig(4, 2, 8, True, 1, frozenset({0, 5})), [1, 2, 3, 4]),
        (MoEConfig(4, 2, 8, True, 3, frozenset({2})), [5]),
    ],
    ids=str,
)
def test_which_layers_are_sparse(config, sparse):
    assert [layer for layer in range(6) if config.is_sparse(layer)] == sparse
