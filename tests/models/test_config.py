"""config.json in both spellings, and every refusal with the words that a user reads."""

from __future__ import annotations

import json

import pytest

from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import make_engine
from minisgl.errors import ConfigError, ModelFormatError
from minisgl.models.config import load_model_config, parse_model_config
from tests.models.small import LLAMA, MOE, QWEN3
from tests.tools.tiny_models import NAMES

QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
SUPPORTED = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_mean_the_same(tiny_models, name):
    model_dir = tiny_models(name)
    new = json.loads((model_dir / "config_v5.json").read_text())
    old = json.loads((model_dir / "config.json").read_text())
    assert "rope_parameters" in new
    assert "rope_parameters" not in old
    assert parse_model_config(new) == parse_model_config(old) == load_model_config(model_dir)


def test_values_that_are_read(tiny_models):
    config = load_model_config(tiny_models("llama"))
    assert (config.architecture, config.num_layers, config.hidden_size, config.vocab_size) == ("LlamaForCausalLM", 4, 256, 4096)
    assert (config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim) == (8, 2, 32)
    assert (config.context_len, config.dtype, config.is_tied, config.moe) == (2048, "bfloat16", False, None)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("llama3", 8.0, 500000.0)


@pytest.mark.parametrize(("key", "value"), [("torch_dtype", "float16"), ("dtype", "bfloat16"), ("torch_dtype", "torch.float32")])
def test_dtype_spellings(key, value):
    assert parse_model_config(LLAMA | {key: value}).dtype == value.removeprefix("torch.")


def test_model_type_stands_in_for_missing_architectures():
    config = {key: value for key, value in MOE.items() if key != "architectures"}
    assert parse_model_config(config).architecture == "Qwen3MoeForCausalLM"


REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, f"architecture GPT2LMHeadModel is not supported; supported are {SUPPORTED}"),
    ({"architectures": "GPT2LMHeadModel"}, "architecture GPT2LMHeadModel is not supported"),
    ({"architectures": [], "model_type": "gpt2"}, "architecture model_type 'gpt2' is not supported"),
    ({"architectures": None, "model_type": None}, "architecture model_type None is not supported"),
    ({"architectures": [["x"]]}, "is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; supported: 'silu', 'swish'"),
    ({"hidden_act": ["silu"]}, r"hidden_act: \['silu'\] is not supported"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config: 'gptq' is not supported; use an unquantised"),
    ({"quantization_config": "fp8"}, "quantization_config: 'fp8' is not supported"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config: 'compressed-tensors' is not supported"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype: 'float8_e4m3fn' is not supported; supported: 'float32', 'bfloat16', 'float16'"),
    ({"hidden_size": 0}, "hidden_size: 0 found, a whole number of at least 1 is wanted"),
    ({"hidden_size": "48"}, "hidden_size: '48' found"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers: 2.0 found"),
    ({"num_hidden_layers": True}, "num_hidden_layers: True found"),
    ({"vocab_size": None}, "vocab_size: None found"),
    ({"intermediate_size": -1}, "intermediate_size: -1 found"),
    ({"max_position_embeddings": None}, "max_position_embeddings: None found"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 48 is not a multiple of num_attention_heads 5 and there is no"),
    ({"head_dim": 17}, "head_dim: 17 found, rotary embeddings need an even one"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps: 'tiny' found, a number above 0 is wanted"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps: inf found"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings: 'false' found, true or false is wanted"),
    ({"attention_bias": 1}, "attention_bias: 1 found, true or false is wanted"),
    ({"layer_types": "full_attention"}, "layer_types: 'full_attention' found, a list is wanted"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: 'linear_attention' is not supported; supported: 'full_atten"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[" ".join(f"{k}={v}" for k, v in keys.items()) for keys, _ in REFUSED])
def test_refused_by_name_and_value(tmp_path, keys, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | keys))
    with pytest.raises(ModelFormatError, match=message) as caught:
        load_model_config(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


MOE_REFUSED = [
    ({"num_experts": None}, "num_experts: None found"),
    ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 is more than num_experts 5"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size: None found"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0 found"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob: 'yes' found"),
    ({"mlp_only_layers": 3}, "mlp_only_layers: 3 found, a list of layer numbers is wanted"),
    ({"mlp_only_layers": ["0"]}, r"mlp_only_layers: \['0'\] found"),
]


@pytest.mark.parametrize(("keys", "message"), MOE_REFUSED, ids=str)
def test_moe_keys_refused(keys, message):
    with pytest.raises(ModelFormatError, match=message):
        parse_model_config(MOE | keys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "holds a list, an object is wanted"),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFormatError, match=message):
        load_model_config(tmp_path)


WINDOWS = [
    (MISTRAL, {"sliding_window": None}, None),
    (MISTRAL, {"sliding_window": 64}, 64),
    (MISTRAL, {"use_sliding_window": False, "sliding_window": 64}, 64),
    (QWEN2, {"sliding_window": 64}, None),
    (QWEN2, {"sliding_window": 64, "use_sliding_window": True}, 64),
    (QWEN2, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, None),
    (QWEN2, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, 64),
    (QWEN2, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 0}, 4096),
    (QWEN2, {"sliding_window": None, "use_sliding_window": True}, None),
    (QWEN3, {"sliding_window": 64, "layer_types": ["full_attention"] * 4}, None),
    (QWEN3, {"sliding_window": 64, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, 64),
    (QWEN3, {"sliding_window": 64, "use_sliding_window": False}, None),
    (MOE, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, 64),
    (LLAMA, {"sliding_window": 64}, None),
]


@pytest.mark.parametrize(("base", "keys", "window"), WINDOWS, ids=[f"{b['model_type']} {k}" for b, k, _ in WINDOWS])
def test_windows_count_where_transformers_uses_them(base, keys, window):
    assert parse_model_config(base | keys).sliding_window == window


def test_a_mistral_config_without_the_key_has_transformers_window():
    config = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert parse_model_config(config).sliding_window == 4096


def engine_with_window(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL | {"sliding_window": 64}))
    return make_engine(EngineConfig(model_path=str(tmp_path), use_dummy_weight=True, device="cpu", num_pages=8, **config))


def test_a_window_in_use_is_refused_with_the_flag_that_helps(tmp_path):
    message = "sliding window of 64 tokens, which is not supported; --max-seq-len 64 serves sequences that fit into one window"
    with pytest.raises(ConfigError, match=message):
        engine_with_window(tmp_path)
    with pytest.raises(ConfigError, match=message):
        engine_with_window(tmp_path, max_seq_len=65)


def test_a_window_in_use_serves_sequences_within_it(tmp_path):
    assert engine_with_window(tmp_path, max_seq_len=64).limits.max_seq_len == 64


def test_a_longer_sequence_than_the_models_context_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="--max-seq-len 257: the model's context is 256 tokens"):
        make_engine(EngineConfig(model_path=str(tmp_path), use_dummy_weight=True, device="cpu", num_pages=8, max_seq_len=257))


def test_num_key_value_heads_defaults_to_one_per_query_head():
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert parse_model_config(config).attention.num_kv_heads == 4
