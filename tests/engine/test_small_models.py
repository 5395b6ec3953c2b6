"""Sizes, flags and biases that the tiny models do not have, against transformers: logits of every token of a prompt."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from minisgl.errors import ModelFormatError
from minisgl.models.config import parse_model_config
from minisgl.models.registry import ARCHITECTURES, Architecture
from tests.models.small import (
    LLAMA,
    MOE,
    QWEN3,
    edit_weights,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from tests.tools.markdown import code_blocks, table_rows

ADDING_A_MODEL = Path(__file__).resolve().parents[2] / "docs" / "adding-a-model.md"
TOLERANCE = 5e-5
"""Logits are of size 1 to 5; fp32 rounding is some 3e-6 here."""
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "attention bias": LLAMA | {"attention_bias": True},
    "mlp bias": LLAMA | {"mlp_bias": True},
    "qwen3 with attention bias": QWEN3 | {"attention_bias": True},
    "qwen2": QWEN2,
    "one KV head": LLAMA | {"num_key_value_heads": 1},
    "as many KV heads": LLAMA | {"num_key_value_heads": 4},
    "three queries a KV head": LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
    "head_dim 2": LLAMA | {"head_dim": 2},
    "head_dim 6": LLAMA | {"head_dim": 6},
    "head_dim 80": LLAMA | {"head_dim": 80},
    "head_dim 96": QWEN3 | {"head_dim": 96},
    "head_dim 128": MISTRAL | {"head_dim": 128},
    "one layer": LLAMA | {"num_hidden_layers": 1},
    "large eps": LLAMA | {"rms_norm_eps": 0.05},
    "linear rope": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn rope": LLAMA | {"rope_scaling": YARN},
    "yarn rope without attention factor": LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.0}},
    "moe": MOE,
    "moe, dense first layer": MOE | {"mlp_only_layers": [0]},
    "moe, every second layer": MOE | {"decoder_sparse_step": 2},
    "moe, every second layer but the last": MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "moe, not renormalised": MOE | {"norm_topk_prob": False},
    "moe, one expert each": MOE | {"num_experts_per_tok": 1},
    "moe, one expert each, not renormalised": MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "moe, all experts": MOE | {"num_experts_per_tok": 5, "norm_topk_prob": False},
    "moe with attention bias": MOE | {"attention_bias": True},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path, case):
    config = CASES[case]
    model = reference_model(config)
    model_dir = save(model, config, tmp_path / "m")
    torch.testing.assert_close(our_logits(model_dir), reference_logits(model), rtol=0, atol=TOLERANCE)


PAIRS = [
    ("moe", "moe, not renormalised"),
    ("yarn rope", "yarn rope without attention factor"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_flag_that_fits_the_same_weights_changes_the_logits(tmp_path, one, other):
    """Else the test above would not see it ignored. (Flags that move layers between dense and sparse change the tensors' names.)"""
    model_dir = save(reference_model(CASES[one]), CASES[one], tmp_path / "m")
    first = our_logits(model_dir)
    save(reference_model(CASES[one]), CASES[other], tmp_path / "m")
    assert float((our_logits(model_dir) - first).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("keys", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {"num_experts": 4}])
def test_moe_flags_that_do_not_fit_the_weights_are_refused(tmp_path, keys):
    model_dir = save(reference_model(MOE), MOE | keys, tmp_path / "m")
    with pytest.raises(ModelFormatError, match=r"layers.1.mlp|layers.0.mlp|shape"):
        our_logits(model_dir)


@pytest.mark.parametrize("flag", [True, False, None], ids=["true", "false", "absent"])
@pytest.mark.parametrize("has_head", [True, False], ids=["head", "no head"])
def test_tied_embeddings_in_every_mix(tmp_path, flag, has_head):
    """With the flag, the embedding is the head and a head in the file is dropped; without it, the head must be there."""
    reference_config = LLAMA | {"tie_word_embeddings": flag is True}
    model = reference_model(reference_config)
    config = {key: value for key, value in reference_config.items() if key != "tie_word_embeddings"}
    model_dir = save(model, config if flag is None else config | {"tie_word_embeddings": flag}, tmp_path / "m")
    if flag and has_head:
        edit_weights(model_dir, lm_head__weight=torch.randn(96, 48))
    if not flag and not has_head:
        edit_weights(model_dir, lm_head__weight=None)
        with pytest.raises(ModelFormatError, match=r"lm_head.weight is missing"):
            our_logits(model_dir)
        return
    torch.testing.assert_close(our_logits(model_dir), reference_logits(model), rtol=0, atol=TOLERANCE * 10 if flag else TOLERANCE)


def test_the_row_that_the_documentation_adds_serves_a_new_architecture(tmp_path, monkeypatch):
    """An architecture that fits the common decoder is one row; the page's is a Qwen3 with biases on q, k and v."""
    config = QWEN3 | {"architectures": ["NewForCausalLM"], "model_type": "new"}
    with pytest.raises(ModelFormatError, match="architecture NewForCausalLM is not supported"):
        parse_model_config(config)
    monkeypatch.setitem(ARCHITECTURES, "NewForCausalLM", None)  # so that it is taken out again
    exec(code_blocks(ADDING_A_MODEL.read_text(encoding="utf-8"), "python")[0])
    model = reference_model(QWEN3 | {"attention_bias": True})
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.data.zero_()
    model_dir = save(model, config, tmp_path / "m")
    edit_weights(model_dir, **{f"model__layers__{layer}__self_attn__o_proj__bias": None for layer in range(4)})
    torch.testing.assert_close(our_logits(model_dir), reference_logits(model), rtol=0, atol=TOLERANCE)
    assert parse_model_config({k: v for k, v in config.items() if k != "architectures"}).architecture == "NewForCausalLM"


def test_the_documentation_lists_every_field_of_a_row():
    rows = table_rows(ADDING_A_MODEL.read_text(encoding="utf-8"), "field")
    assert {row[0].strip("`") for row in rows} == {field.name for field in fields(Architecture)}
