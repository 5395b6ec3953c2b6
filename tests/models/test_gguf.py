"""GGUF files: the config and the tensors that they stand for, exactly; refusals by name."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from minisgl.errors import ModelFormatError
from minisgl.models.config import parse_model_config
from minisgl.models.convert import convert_gguf
from minisgl.models.gguf import iter_gguf_tensors, open_gguf, read_gguf_config
from minisgl.tokenizer import load_tokenizer
from minisgl.tokenizer.gguf_vocab import gguf_end_ids, gguf_tokenizer_files
from tests.models import gguf_files
from tests.models.gguf_files import write_gguf

ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3moe"]
KINDS = [getattr(gguf.GGMLQuantizationType, name) for name in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_come_back_under_their_checkpoint_names(tmp_path, architecture, tied):
    meant = write_gguf(tmp_path / "m.gguf", architecture, tied)
    found = dict(iter_gguf_tensors(tmp_path / "m.gguf"))
    assert found.keys() == meant.keys()
    for name, values in found.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, meant[name], err_msg=name)


@pytest.mark.parametrize(
    ("architecture", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen3moe", KINDS[0]), ("qwen3moe", KINDS[2]), ("qwen2", KINDS[4])]
)
def test_quantised_tensors_are_dequantised_exactly(tmp_path, architecture, kind):
    meant = write_gguf(tmp_path / "m.gguf", architecture, quantised=kind)
    for name, values in iter_gguf_tensors(tmp_path / "m.gguf"):
        np.testing.assert_array_equal(values, meant[name], err_msg=name)


@pytest.mark.parametrize("kind", [None, *KINDS[:3]], ids=lambda kind: kind.name if kind else "F32")
def test_a_converted_directory_rounds_nothing(tmp_path, kind):
    meant = write_gguf(tmp_path / "m.gguf", "llama", quantised=kind)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    half = {"F16": "F16", "BF16": "BF16"}.get(kind.name if kind else "", "F32")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == meant.keys()
        for name in file.keys():  # noqa: SIM118 - it is no dict
            tensor = file.get_tensor(name)
            assert file.get_slice(name).get_dtype() == (half if tensor.ndim > 1 else "F32")
            np.testing.assert_array_equal(tensor.float().numpy(), meant[name], err_msg=name)
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == names[half]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_config_equals_what_the_file_says(tmp_path, architecture, tied):
    write_gguf(tmp_path / "m.gguf", architecture, tied)
    raw = read_gguf_config(tmp_path / "m.gguf")
    config = parse_model_config(json.loads(json.dumps(raw)))
    assert config.architecture == raw["architectures"][0]
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (gguf_files.LAYERS, gguf_files.HIDDEN, gguf_files.INNER)
    assert (config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim) == (4, 2, 32)
    assert config.vocab_size == gguf_files.VOCAB
    assert config.context_len == 512
    assert config.is_tied is tied
    assert config.attention.rms_norm_eps == 1e-5
    assert config.attention.has_qkv_bias == (architecture == "qwen2")
    assert config.attention.has_qk_norm == architecture.startswith("qwen3")
    if architecture == "qwen3moe":
        assert config.moe is not None
        assert (config.moe.num_experts, config.moe.num_experts_per_token, config.moe.is_renormalised) == (3, 2, True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_equal_transformers_reading_the_same_file(tmp_path, architecture, tied):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    write_gguf(tmp_path / "m.gguf", architecture, tied, quantised=gguf.GGMLQuantizationType.Q8_0)
    raw = read_gguf_config(tmp_path / "m.gguf")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    expected = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    found = dict(iter_gguf_tensors(tmp_path / "m.gguf"))
    if architecture == "qwen3moe":  # transformers stacks experts: compare what has equal names, and the stacks by parts
        stacked = {name: values for name, values in expected.items() if "experts" in name}
        assert stacked
        expected = {name: values for name, values in expected.items() if name not in stacked}
        for layer in range(gguf_files.LAYERS):
            at = f"model.layers.{layer}.mlp.experts."
            gate_up, down = stacked[f"{at}gate_up_proj"], stacked[f"{at}down_proj"]
            for expert in range(gguf_files.EXPERTS):
                parts = [found.pop(f"{at}{expert}.{name}_proj.weight") for name in ("gate", "up")]
                np.testing.assert_array_equal(np.concatenate(parts), np.asarray(gate_up[expert]))
                np.testing.assert_array_equal(found.pop(f"{at}{expert}.down_proj.weight"), np.asarray(down[expert]))
    assert found.keys() == {name for name in expected if not (tied and name == "lm_head.weight")}
    for name, values in found.items():
        np.testing.assert_array_equal(values, np.asarray(expected[name]), err_msg=name)


def test_the_files_of_a_converted_directory_fit_together(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3", extra_keys={"tokenizer.ggml.eot_token_id": 0})
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == gguf_files.VOCAB - 1  # the unused token at the end is none
    assert tokenizer.encode("he<|im_end|>") == [3 + 256, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}]) == [3 + 256]
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape == (gguf_files.VOCAB, gguf_files.HIDDEN)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling_keys(tmp_path, keys, expected):
    write_gguf(tmp_path / "m.gguf", "qwen3", extra_keys={f"qwen3.{key}": value for key, value in keys.items()})
    assert read_gguf_config(tmp_path / "m.gguf")["rope_scaling"] == expected


def llama3_divisors(head_dim, theta, factor, low, high, original):
    """Llama 3.1's rule, frequency by frequency, as its reference describes it."""
    divisors = []
    for place in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (place / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama_3_divisors_become_the_rule_they_follow(tmp_path):
    divisors = llama3_divisors(gguf_files.HEAD_DIM, 10000.0, 8.0, 1.0, 4.0, 8192)
    assert np.any((divisors > 1) & (divisors < 8))  # all three cases of the rule occur
    write_gguf(tmp_path / "m.gguf", "llama", extra_tensors={"rope_freqs.weight": divisors}, extra_keys={"llama.rope.scaling.type": "none"})
    scaling = read_gguf_config(tmp_path / "m.gguf")["rope_scaling"]
    expected = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert scaling == {"rope_type": "llama3", "factor": 8.0, **expected}
    assert "rope_freqs.weight" not in dict(iter_gguf_tensors(tmp_path / "m.gguf"))


def test_divisors_that_follow_no_known_rule_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", extra_tensors={"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)})
    with pytest.raises(ModelFormatError, match=r"rope_freqs.weight does not follow"):
        read_gguf_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama.attention.scale": 0.5}, r"llama.attention.scale is 0.5; this key is not understood"),
        ({"llama.logit_scale": 2.0}, r"llama.logit_scale"),
        ({"llama.rope.scaling.type": "longrope"}, r"'longrope' is not supported; supported are none, linear, yarn"),
        ({"llama.rope.scaling.factor": 4.0}, r"rope.scaling.factor is 4.0 and there is no rope.scaling.type"),
        ({"llama.rope.dimension_count": 16}, r"rope.dimension_count is 16 and the key length 32"),
        ({"llama.expert_count": 8}, r"llama with 8 experts is not supported; qwen3moe is"),
    ],
)
def test_keys_that_change_the_computation_are_refused_by_name(tmp_path, keys, words):
    write_gguf(tmp_path / "m.gguf", extra_keys=keys)
    with pytest.raises(ModelFormatError, match=words):
        read_gguf_config(tmp_path / "m.gguf")


def test_an_architecture_that_is_not_supported_is_named_with_those_that_are(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match=r"'falcon' is not supported; supported are llama, qwen2, qwen3, qwen3moe"):
        open_gguf(tmp_path / "m.gguf")


def test_a_tensor_that_is_not_understood_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra_tensors={"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)})
    with pytest.raises(ModelFormatError, match=r"blk.0.attn_sinks.weight \[4\] is not understood"):
        list(iter_gguf_tensors(tmp_path / "m.gguf"))


def test_one_part_of_several_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra_keys={"split.count": 3})
    with pytest.raises(ModelFormatError, match="one of 3 parts"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 5000, -3000])
def test_a_truncated_file_is_refused(tmp_path, kept):
    write_gguf(tmp_path / "whole.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:kept])
    with pytest.raises(ModelFormatError, match=r"m.gguf: not a GGUF file that can be read"):
        open_gguf(tmp_path / "m.gguf")


def test_other_files_and_missing_ones_are_refused(tmp_path):
    (tmp_path / "m.gguf").write_text("hello " * 100)
    with pytest.raises(ModelFormatError, match="not a GGUF file"):
        open_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelFormatError, match="no such file"):
        open_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("pre", ["default", "gpt-2", "tekken"])
def test_a_pre_tokenizer_that_was_not_tested_is_refused_by_name_before_anything_is_written(tmp_path, pre):
    write_gguf(tmp_path / "m.gguf", pre=pre)
    with pytest.raises(
        ModelFormatError, match=rf"tokenizer.ggml.pre='{pre}' is not supported; supported are model 'gpt2' with pre 'llama-bpe'"
    ):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


WRONG = [0, -1, 2**40, "many", "", [4, 4], [], True, 0.5, float("nan"), float("inf"), {"a": 1}]
MODEL_KEYS = [
    "embedding_length",
    "block_count",
    "context_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_weights_norm",
]
FILE_KEYS = [
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.chat_template",
    "tokenizer.chat_templates",
]


MEANT = {
    *((key, 0.5) for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scaling.yarn_beta_fast")),
    ("attention.sliding_window", 0),
    ("expert_weights_norm", True),
    *((f"tokenizer.ggml.{name}_token_id", 0) for name in ("bos", "eos", "eot")),
    ("tokenizer.ggml.add_bos_token", True),
    *(("tokenizer.chat_template", text) for text in ("many", "")),
}


def test_any_wrong_value_of_a_key_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3moe")
    model = open_gguf(tmp_path / "m.gguf")
    yarn = {"type": "yarn", "factor": 2.0, "original_context_length": 128}
    metadata = model.metadata | {f"qwen3moe.rope.scaling.{key}": value for key, value in yarn.items()}
    for key in MODEL_KEYS + FILE_KEYS:
        full_key = f"qwen3moe.{key}" if key in MODEL_KEYS else key
        for value in WRONG:
            if value == [] and key == "tokenizer.chat_templates":
                continue
            changed = dataclasses.replace(model, metadata=metadata | {full_key: value})
            message = None
            try:
                changed.config()
                changed.checkpoint()
                gguf_tokenizer_files(changed.metadata, "m.gguf")
                gguf_end_ids(changed.metadata, "m.gguf")
            except ModelFormatError as error:
                message = str(error)
            is_meant = any((key, type(value), value) == (meant, type(right), right) for meant, right in MEANT)
            assert (message is None) == is_meant, (key, value, message)
            assert message is None or key in message, (key, value, message)


@pytest.mark.parametrize("value", ["many", 2.5, True])
def test_a_number_of_parts_that_is_none_is_refused(tmp_path, value):
    write_gguf(tmp_path / "m.gguf", extra_keys={"split.count": value})
    with pytest.raises(ModelFormatError, match=r"split.count is .*; a whole number is wanted"):
        open_gguf(tmp_path / "m.gguf")
