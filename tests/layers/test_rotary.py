"""Angles of every rope kind against transformers' rotary modules, near and far, and the config keys that select them."""

from __future__ import annotations

import pytest
import torch

from minisgl.errors import ModelFormatError
from minisgl.layers.rotary import Rotary
from minisgl.models.config import parse_model_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": YARN,
    "yarn with an attention factor": YARN | {"attention_factor": 0.7},
    "yarn with mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn with equal mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn with betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn without truncation": YARN | {"truncate": False},
    "yarn without an original length": {"factor": 2.0},
    "yarn below 1": YARN | {"factor": 0.5},
}


def scaling_of(name):
    kind = name.split()[0]
    return {"rope_type": kind} | SCALINGS[name]


def ours(config, positions):
    rotary = Rotary(parse_model_config(config).rope, torch.device("cpu"))
    return rotary.cos_sin(torch.tensor(positions), torch.float32)


def theirs(config, position):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")}))
    cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([[position]]))
    half = cos.shape[-1] // 2
    return cos[0, 0, :half], sin[0, 0, :half]


@pytest.mark.filterwarnings("ignore")  # transformers comments on unusual factors
@pytest.mark.parametrize("position", [0, 10, 32767, 40000, 130000])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_equal_transformers(name, head_dim, position):
    config = CONFIG | {"head_dim": head_dim, "rope_scaling": scaling_of(name)}
    cos, sin = ours(config, [3, position])
    their_cos, their_sin = theirs(config, position)
    torch.testing.assert_close(cos[1], their_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[1], their_sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
def test_scaling_changes_the_angles(name):
    """Else the comparison above would say nothing about it."""
    plain, _ = ours(CONFIG, [40000])
    scaled, _ = ours(CONFIG | {"rope_scaling": scaling_of(name)}, [40000])
    assert float((plain - scaled).abs().max()) > 0.1


def test_dynamic_angles_depend_on_the_position_alone():
    """transformers recomputes all angles of a call from its highest position; cached keys are never computed again, so ours must not."""
    config = CONFIG | {"rope_scaling": scaling_of("dynamic")}
    together = ours(config, [5, 100, 40000, 90000])
    for index, position in enumerate([5, 100, 40000, 90000]):
        alone = ours(config, [position])
        assert torch.equal(together[0][index], alone[0][0])
        assert torch.equal(together[1][index], alone[1][0])


def test_angles_in_bf16_are_fp32_angles_rounded():
    rotary = Rotary(parse_model_config(CONFIG).rope, torch.device("cpu"))
    positions = torch.tensor([40000])
    assert torch.equal(rotary.cos_sin(positions, torch.bfloat16)[0], rotary.cos_sin(positions, torch.float32)[0].bfloat16())


SAME_AS_DEFAULT = [
    {},
    {"rope_scaling": None},
    {"rope_scaling": {}},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {"type": "default"}},
    {"rope_parameters": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0}},
    {"partial_rotary_factor": 1.0},
    {"partial_rotary_factor": None},
]


@pytest.mark.parametrize("keys", SAME_AS_DEFAULT, ids=str)
def test_spellings_of_no_scaling(keys):
    assert parse_model_config(CONFIG | keys) == parse_model_config(CONFIG)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
def test_four_spellings_of_the_same_scaling(name):
    kind, numbers = name.split()[0], SCALINGS[name]
    new = parse_model_config(CONFIG | {"rope_scaling": {"rope_type": kind} | numbers})
    assert parse_model_config(CONFIG | {"rope_scaling": {"type": kind} | numbers}) == new
    assert parse_model_config(CONFIG | {"rope_scaling": {"rope_type": None, "type": kind} | numbers}) == new
    without_theta = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    parameters = {"rope_type": kind, "rope_theta": CONFIG["rope_theta"]} | numbers
    assert parse_model_config(without_theta | {"rope_parameters": parameters}) == new
    assert parse_model_config(CONFIG | {"rope_parameters": parameters, "rope_scaling": {"type": kind} | numbers}) == new


@pytest.mark.parametrize("key", ["low_freq_factor", "high_freq_factor", "factor", "original_max_position_embeddings"])
def test_llama3_without_one_of_its_numbers_is_refused(key):
    scaling = {k: v for k, v in scaling_of("llama3").items() if k != key}
    with pytest.raises(ModelFormatError, match=f"{key}: None found"):
        parse_model_config(CONFIG | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("scaling", "context_len"),
    [
        ({}, 32768),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}, 32768),
        ({"type": "yarn", "factor": 2.5}, 81920),
        ({"rope_type": "linear", "factor": 4.0}, 131072),
        ({"rope_type": "dynamic", "factor": 2.0}, 65536),
        (SCALINGS["llama3"] | {"rope_type": "llama3"}, 32768),
    ],
    ids=str,
)
def test_context_length_that_scaling_allows(scaling, context_len):
    assert parse_model_config(CONFIG | {"rope_scaling": scaling}).context_len == context_len


REFUSED = [
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, r"rope_type: 'longrope' is not supported; supported: 'default', 'linear'"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not supported"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "'mrope' is not supported"),
    ({"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, r"\['yarn'\] is not supported"),
    ({"rope_scaling": "yarn"}, "rope_scaling: 'yarn' found, an object or null is wanted"),
    ({"rope_parameters": [1]}, r"rope_parameters: \[1\] found, an object or null is wanted"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"one rope per layer type \(full_attention\) is not supported"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 4}}, "contradict each other"),
    ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e5}}, "contradict each other"),
    ({"rope_scaling": {"type": "linear"}}, "factor: None found, a number above 0 is wanted"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor: '2' found"),
    ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor: 0 found"),
    ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": "no"}}, "truncate: 'no' found, true or false is wanted"),
    ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "factor: nan found"),
    ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta: 1 found, yarn wants a number above 1"),
    ({"rope_theta": -1.0}, "rope_theta: -1.0 found"),
    ({"rope_scaling": scaling_of("llama3") | {"high_freq_factor": 1.0}}, "high_freq_factor 1 must be above low_freq_factor 1"),
    ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic with head_dim 2"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: 0.5 is not supported; supported: 1.0"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor: 0.25 is not supported"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(keys, message):
    with pytest.raises(ModelFormatError, match=message):
        parse_model_config(CONFIG | keys)
