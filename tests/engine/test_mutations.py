"""The parity check can fail: each mistake that an engine could make is found by it. Without this, a check that passes means little."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel import reference
from tests.engine.parity import Expected, differences, run, tiny_engine
from tests.tools.tiny_models import NAMES

NUM_STEPS = 4
CASES = range(5)
"""All prompts but the long one: a mistake that shows in none of these in four steps would be subtle indeed."""
CONFIG_MUTATIONS = [
    *((name, {"rope_theta": 10000.0}) for name in NAMES),
    ("llama", {"rope_scaling": None}),
    *((name, {"rms_norm_eps": 10}) for name in NAMES),
    ("qwen3-moe", {"num_experts_per_tok": 1}),
    ("qwen3-moe", {"norm_topk_prob": False}),
]
"""rms_norm_eps is a factor: it moves no greedy id, only logits."""
WEIGHT_MUTATIONS = {
    "input norms are 1": lambda name, tensor: tensor.fill_(1) if name.endswith("input_layernorm.weight") else None,
    "post-attention norms are 1": lambda name, tensor: tensor.fill_(1) if name.endswith("post_attention_layernorm.weight") else None,
    "the final norm is 1": lambda name, tensor: tensor.fill_(1) if name == "model.norm.weight" else None,
    "q norms are 1": lambda name, tensor: tensor.fill_(1) if name.endswith("q_norm.weight") else None,
    "k norms are 1": lambda name, tensor: tensor.fill_(1) if name.endswith("k_norm.weight") else None,
    "q biases are 0": lambda name, tensor: tensor.zero_() if name.endswith("q_proj.bias") else None,
    "v biases are 0": lambda name, tensor: tensor.zero_() if name.endswith("v_proj.bias") else None,
    "KV heads of v are swapped in the last layer": lambda name, tensor: swap_heads(tensor) if "3.self_attn.v_proj" in name else None,
    "KV heads of k are swapped in the last layer": lambda name, tensor: swap_heads(tensor) if "3.self_attn.k_proj" in name else None,
}
ONLY_QWEN3 = ("q norms are 1", "k norms are 1")
ONLY_QWEN2 = ("q biases are 0", "v biases are 0")


def swap_heads(tensor):
    """The two halves of the KV heads change places."""
    tensor.copy_(tensor.clone().roll(len(tensor) // 2, dims=0))


def findings(engine, expected):
    return list(differences(expected, run(engine, [expected.prompts[case] for case in CASES], NUM_STEPS)))


def edited(model_dir, target, changes):
    """A copy of the model directory with another config.json."""
    target.mkdir()
    for path in model_dir.iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    config = json.loads((model_dir / "config.json").read_text())
    if "rms_norm_eps" in changes:
        changes = {"rms_norm_eps": changes["rms_norm_eps"] * config["rms_norm_eps"]}
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize(("name", "changes"), CONFIG_MUTATIONS, ids=lambda value: value if isinstance(value, str) else next(iter(value)))
def test_a_wrong_number_in_the_config_is_caught(tiny_models, tmp_path, name, changes):
    model_dir = edited(tiny_models(name), tmp_path / "model", changes)
    assert findings(tiny_engine(model_dir), Expected.of(tiny_models(name))) != []


def test_a_ten_fold_eps_shows_in_logits_only(tiny_models, tmp_path):
    """Why the check bounds logits: equal ids alone would pass this mistake."""
    model_dir = edited(tiny_models("llama"), tmp_path / "model", {"rms_norm_eps": 10})
    found = findings(tiny_engine(model_dir), Expected.of(tiny_models("llama")))
    assert found
    assert all("logits are" in text for text in found)


def weight_mutations():
    for name in NAMES:
        for mutation in WEIGHT_MUTATIONS:
            is_here = name.startswith("qwen3") if mutation in ONLY_QWEN3 else name == "qwen2" if mutation in ONLY_QWEN2 else True
            if is_here:
                yield name, mutation


@pytest.fixture(scope="module")
def engines(tiny_models):
    """Engines by name, whose weights each test puts back. They are not packed, so that they can be changed."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        yield lambda name: made.setdefault(name, (tiny_engine(tiny_models(name)), Expected.of(tiny_models(name))))


@pytest.mark.parametrize(("name", "mutation"), list(weight_mutations()))
def test_a_forgotten_or_misplaced_weight_is_caught(engines, name, mutation):
    engine, expected = engines(name)
    weights = engine.model.state_dict()
    before = {key: tensor.clone() for key, tensor in weights.items()}
    for key, tensor in weights.items():
        WEIGHT_MUTATIONS[mutation](key, tensor)
    is_changed = any(not torch.equal(before[key], tensor) for key, tensor in weights.items())
    found = findings(engine, expected)
    engine.model.load_state_dict(before)
    assert is_changed
    assert found != []


@pytest.mark.parametrize("name", NAMES)
def test_the_unharmed_engine_passes_the_same_check(engines, name):
    assert findings(*engines(name)) == []


def gelu_mul(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def swapped_silu_mul(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(up) * gate


def interleaved_rope(x, cos, sin):
    """Pairs neighbours instead of halves."""
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)


CODE_MUTATIONS = {
    "gelu": ("silu_mul", gelu_mul),
    "gate and up swapped": ("silu_mul", swapped_silu_mul),
    "no rotation": ("apply_rope", lambda x, cos, sin: x),
    "interleaved rotation": ("apply_rope", interleaved_rope),
}


@pytest.mark.parametrize("mutation", CODE_MUTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_formula_is_caught(engines, monkeypatch, name, mutation):
    engine, expected = engines(name)
    attribute, wrong = CODE_MUTATIONS[mutation]
    monkeypatch.setattr(reference, attribute, wrong)
    assert findings(engine, expected) != []
