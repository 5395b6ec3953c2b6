"""GGUF files: their metadata as a config.json, their tensors under the names of a Hugging Face checkpoint.

Tensors are read and dequantised one at a time by the `gguf` package. llama-type files store the rows of the query and key
projections in another order (pairs of rotary halves interleaved); it is undone here. What a file says that the decoder would not compute
is refused by name.

Knows neither torch nor transformers, and nothing of where the result goes. Called by `convert`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from minisgl.errors import ModelFormatError

__all__ = ["GGUFModel", "GGUFTensor", "iter_gguf_tensors", "open_gguf", "read_gguf_config"]

FloatArray = npt.NDArray[np.float32]

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""`general.architecture` -> class and model_type. Mistral models are exported as llama."""

KNOWN_KEYS = frozenset(
    (
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "tensor_data_layout",
        "pooling_type",
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
        "rope.scaling.finetuned",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_weights_norm",
    )
)

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
ROPE_FACTORS = "rope_freqs.weight"

MAX_SIZE = 2**24
MAX_NUMBER = 1e12
"""Bounds of what is taken for meant, as in config.json."""

StoredType = Literal["F32", "F16", "BF16"]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the checkpoint, not read yet."""

    name: str
    """as in a Hugging Face checkpoint"""
    shape: tuple[int, ...]
    stored: StoredType
    """the smallest type that holds its values exactly; F32 for quantised ones"""
    read: Callable[[], FloatArray]
    """read, dequantise, put rows in order: float32 of `shape`, owned by the caller"""


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """An opened GGUF file."""

    path: Path
    metadata: dict[str, Any]
    """all keys and values of the file"""
    tensors: dict[str, Any]
    """GGUF name -> the gguf package's ReaderTensor"""

    def config(self) -> dict[str, Any]:
        """The model's config.json. Raises ModelFormatError for what is missing or cannot be served."""
        return _config(self)

    def checkpoint(self) -> list[GGUFTensor]:
        """The tensors of the checkpoint, in the file's order. Raises ModelFormatError for a tensor that is not understood."""
        return [entry for name, tensor in self.tensors.items() if name != ROPE_FACTORS for entry in _entries(self, name, tensor)]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` under the architecture's prefix."""
        return self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        """The whole number >= 1 under `key`, or the default if the key is missing. Raises ModelFormatError."""
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise self._wrong(key, value, f"one whole number from 1 to {MAX_SIZE} is wanted")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number > 0 under `key` as the shortest decimal that means the stored float32 (9.999999747378752e-06 is 1e-05),
        or the default. Raises ModelFormatError."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
            raise self._wrong(key, value, f"one number above 0 and below {MAX_NUMBER:g} is wanted")
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        """The truth value under `key`, or the default. Raises ModelFormatError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false is wanted")
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {self.metadata['general.architecture']}.{key} is {value!r}; {wanted}")


def open_gguf(path: str | Path) -> GGUFModel:
    """Read the header of a GGUF file: all metadata and where each tensor lies (seconds, for a large vocabulary).

    Raises ModelFormatError if it is no GGUF file, one of several parts, or of an architecture that is not supported.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelFormatError(f"{path}: no such file")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path}: not a GGUF file that can be read: {error}") from error
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelFormatError(f"{path}: architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    num_parts = metadata.get("split.count", 1)
    if type(num_parts) is not int:
        raise ModelFormatError(f"{path}: split.count is {num_parts!r}; a whole number is wanted")
    if num_parts > 1:
        raise ModelFormatError(f"{path}: one of {num_parts} parts; join them first (llama-gguf-split --merge)")
    return GGUFModel(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_gguf_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a GGUF file. Raises ModelFormatError."""
    return open_gguf(path).config()


def iter_gguf_tensors(path: str | Path) -> Iterator[tuple[str, FloatArray]]:
    """(Hugging Face name, float32 array) of each tensor, one at a time. Raises ModelFormatError."""
    for entry in open_gguf(path).checkpoint():
        yield entry.name, entry.read()


def _config(model: GGUFModel) -> dict[str, Any]:
    architecture = model.metadata["general.architecture"]
    class_name, model_type = ARCHITECTURES[architecture]
    _refuse_unknown_keys(model, architecture)
    if "token_embd.weight" not in model.tensors:
        raise ModelFormatError(f"{model.path}: no tensor token_embd.weight")
    hidden_size, num_heads = model.size("embedding_length"), model.size("attention.head_count")
    head_dim = _head_dim(model, hidden_size, num_heads)
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": int(model.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": model.size("feed_forward_length"),
        "num_hidden_layers": model.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.size("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": model.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(model, head_dim),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
        "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[_stored(model.tensors["token_embd.weight"])],
        "bos_token_id": model.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": model.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if model.get("attention.sliding_window", 0) != 0:
        config |= {"sliding_window": model.size("attention.sliding_window"), "use_sliding_window": True, "max_window_layers": 0}
    return config | _experts(model, architecture)


def _refuse_unknown_keys(model: GGUFModel, architecture: str) -> None:
    for key, value in model.metadata.items():
        short = key.removeprefix(f"{architecture}.")
        if short != key and short not in KNOWN_KEYS:
            raise ModelFormatError(f"{model.path}: {key} is {value!r}; this key is not understood and might change what the model computes")


def _head_dim(model: GGUFModel, hidden_size: int, num_heads: int) -> int:
    head_dim = model.size("attention.key_length", max(hidden_size // num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if model.size(key, head_dim) != head_dim:
            raise ModelFormatError(f"{model.path}: {key} is {model.get(key)} and the key length {head_dim}; only equal ones are supported")
    return head_dim


def _experts(model: GGUFModel, architecture: str) -> dict[str, Any]:
    if architecture != "qwen3moe":
        num_experts = model.get("expert_count", 0)
        if num_experts != 0:
            raise ModelFormatError(f"{model.path}: {architecture} with {num_experts} experts is not supported; qwen3moe is")
        return {}
    return {
        "num_experts": model.size("expert_count"),
        "num_experts_per_tok": model.size("expert_used_count"),
        "moe_intermediate_size": model.size("expert_feed_forward_length"),
        "norm_topk_prob": model.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope_scaling(model: GGUFModel, head_dim: int) -> dict[str, Any] | None:
    kind = model.get("rope.scaling.type", "none")
    if ROPE_FACTORS in model.tensors:
        if kind != "none":
            raise ModelFormatError(f"{model.path}: both {ROPE_FACTORS} and rope.scaling.type {kind!r} found")
        return _llama3_scaling(model, head_dim)
    if kind == "none":
        factor = model.get("rope.scaling.factor", 1.0)
        if factor not in (0, 1) and model.get("rope.scaling.type", None) is None:
            raise ModelFormatError(
                f"{model.path}: rope.scaling.factor is {factor} and there is no rope.scaling.type; it needs one of linear, yarn"
            )
        return None
    if kind not in ("linear", "yarn"):
        raise ModelFormatError(f"{model.path}: rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": model.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = model.size("rope.scaling.original_context_length")
        betas = [name for name in ("beta_fast", "beta_slow") if model.get(f"rope.scaling.yarn_{name}") is not None]
        scaling |= {name: model.number(f"rope.scaling.yarn_{name}") for name in betas}
    return scaling


def _llama3_scaling(model: GGUFModel, head_dim: int) -> dict[str, Any]:
    """Llama 3.1 files hold a divisor for each rotary frequency instead of the rule that makes them. Its published parameters are tried:
    the rule is (1, 4, 8192) in all of that family, and the factor is the largest divisor."""
    found = gguf.dequantize(model.tensors[ROPE_FACTORS].data, model.tensors[ROPE_FACTORS].tensor_type).reshape(-1)
    factor, low, high, original = float(str(found.max())), 1.0, 4.0, 8192
    frequencies = model.number("rope.freq_base", 10000.0) ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original * frequencies / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):
        raise ModelFormatError(f"{model.path}: {ROPE_FACTORS} does not follow Llama 3.1's rule (factor {factor:g}, 1, 4, 8192)")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _stored(tensor: Any) -> StoredType:
    name = tensor.tensor_type.name
    return name if name in ("F16", "BF16") else "F32"


def _entries(model: GGUFModel, name: str, tensor: Any) -> Iterator[GGUFTensor]:
    """The checkpoint's tensors that one tensor of the file makes: one, or one per expert."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, short, kind = match.groups() if match else (None, "", "")
    if layer is None and short in OUTER_NAMES:
        yield GGUFTensor(f"{OUTER_NAMES[short]}.{kind}", shape, _stored(tensor), partial(_dequantise, model, name, tensor.data))
    elif layer is not None and short in EXPERT_NAMES and kind == "weight" and len(shape) == 3:
        for expert in range(shape[0]):
            full_name = f"model.layers.{layer}.mlp.experts.{expert}.{EXPERT_NAMES[short]}.weight"
            yield GGUFTensor(full_name, shape[1:], _stored(tensor), partial(_dequantise, model, name, tensor.data[expert]))
    elif layer is not None and short in LAYER_NAMES:
        read = partial(_dequantise, model, name, tensor.data)
        num_heads = _num_permuted_heads(model, short)
        if num_heads:
            read = partial(_in_halves, read, num_heads)
        yield GGUFTensor(f"model.layers.{layer}.{LAYER_NAMES[short]}.{kind}", shape, _stored(tensor), read)
    else:
        raise ModelFormatError(f"{model.path}: the tensor {name} {list(shape)} is not understood")


def _dequantise(model: GGUFModel, name: str, data: npt.NDArray[Any]) -> FloatArray:
    tensor_type = model.tensors[name].tensor_type
    try:
        values = gguf.dequantize(data, tensor_type)
    except NotImplementedError as error:
        raise ModelFormatError(f"{model.path}: {name} is stored as {tensor_type.name}, which cannot be dequantised") from error
    return np.array(values, dtype=np.float32)


def _num_permuted_heads(model: GGUFModel, short: str) -> int:
    """Heads of a projection whose rows are interleaved in the file; 0 if they are in order."""
    if model.metadata["general.architecture"] != "llama" or short not in ("attn_q", "attn_k"):
        return 0
    num_heads = model.size("attention.head_count")
    return num_heads if short == "attn_q" else model.size("attention.head_count_kv", num_heads)


def _in_halves(read: Callable[[], FloatArray], num_heads: int) -> FloatArray:
    """Rows (2i, 2i + 1) of each head back to rows (i, i + half): the halves that the rotary embedding turns against each other."""
    rows = read()
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
