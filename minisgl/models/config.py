"""Reads a model directory's config.json, in both spellings, and refuses by name what the engine would compute wrongly.

Both spellings: `rope_theta` + `rope_scaling` and `torch_dtype`, as the hub has them; `rope_parameters` and `dtype`, as transformers 5
writes them. Knows no weights. Called by the engine, the tools that plan memory and the loaders.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from minisgl.errors import ModelFormatError
from minisgl.layers.attention import AttentionConfig
from minisgl.layers.mlp import MoEConfig
from minisgl.layers.rotary import RopeConfig, RopeKind
from minisgl.models.registry import ARCHITECTURES, Architecture

__all__ = ["ModelConfig", "load_model_config", "parse_model_config"]

MAX_SIZE = 2**24
"""Largest size in elements or tokens that is taken for meant."""
MAX_NUMBER = 1e12
DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that the decoder needs to know of a model."""

    architecture: str
    num_layers: int
    intermediate_size: int
    vocab_size: int
    context_len: int
    """tokens a sequence may have, stretched rope included"""
    sliding_window: int | None
    """tokens; None if full attention is right at any length. The engine refuses longer sequences."""
    dtype: str
    """the checkpoint's type: float32, bfloat16 or float16"""
    is_tied: bool
    """the embedding is also the LM head"""
    has_mlp_bias: bool
    attention: AttentionConfig
    rope: RopeConfig
    moe: MoEConfig | None

    @property
    def hidden_size(self) -> int:
        return self.attention.hidden_size


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read `model_dir`/config.json. Raises ModelFormatError naming the file, the key, the value and what is supported."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFormatError(f"{model_dir} holds no config.json; a model directory needs one") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelFormatError(f"{path} holds a {type(raw).__name__}, an object is wanted")
    try:
        return parse_model_config(raw)
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: {error}") from error


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """The same from the decoded object."""
    name, architecture = _architecture(raw)
    hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    num_kv_heads = _size(raw, "num_key_value_heads", num_heads)
    head_dim = _head_dim(raw, hidden_size, num_heads)
    if num_heads % num_kv_heads:
        raise ModelFormatError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    _refuse("hidden_act", raw.get("hidden_act", "silu"), ("silu", "swish"))
    _refuse_quantised(raw)
    context_len = _size(raw, "max_position_embeddings")
    rope, context_len = _rope(raw, head_dim, context_len)
    has_bias = architecture.reads_attention_bias and _flag(raw, "attention_bias")
    eps = _number(raw, "rms_norm_eps", 1e-6)
    attention = AttentionConfig(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        has_qkv_bias=architecture.has_qkv_bias or has_bias,
        has_output_bias=has_bias,
        has_qk_norm=architecture.has_qk_norm,
        rms_norm_eps=eps,
    )
    return ModelConfig(
        architecture=name,
        num_layers=_size(raw, "num_hidden_layers"),
        intermediate_size=_size(raw, "intermediate_size"),
        vocab_size=_size(raw, "vocab_size"),
        context_len=context_len,
        sliding_window=_sliding_window(raw, architecture),
        dtype=_dtype(raw),
        is_tied=_flag(raw, "tie_word_embeddings", architecture.is_tied_by_default),
        has_mlp_bias=architecture.reads_mlp_bias and _flag(raw, "mlp_bias"),
        attention=attention,
        rope=rope,
        moe=_moe(raw) if architecture.is_moe else None,
    )


def _architecture(raw: dict[str, Any]) -> tuple[str, Architecture]:
    names = raw.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    by_type = [name for name, entry in ARCHITECTURES.items() if entry.model_type == raw.get("model_type")]
    if not names and by_type:
        return by_type[0], ARCHITECTURES[by_type[0]]
    found = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r}"
    raise ModelFormatError(f"architecture {found} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _number(raw: dict[str, Any], key: str, default: float | None = None, low: float = 0.0) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > low:
        raise ModelFormatError(f"{key}: {_short(value)} found, a number above {low:g} is wanted")
    if value > MAX_NUMBER:
        raise ModelFormatError(f"{key}: {_short(value)} found, at most {MAX_NUMBER:g} is supported")
    return float(value)


def _size(raw: dict[str, Any], key: str, default: int | None = None, low: int = 1) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ModelFormatError(f"{key}: {_short(value)} found, a whole number of at least {low} is wanted")
    if value > MAX_SIZE:
        raise ModelFormatError(f"{key}: {_short(value)} found, at most {MAX_SIZE} is supported")
    return value


def _short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flag(raw: dict[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ModelFormatError(f"{key}: {value!r} found, true or false is wanted")
    return bool(value)


def _head_dim(raw: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ModelFormatError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and there is no head_dim")
    head_dim = _size(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelFormatError(f"head_dim: {head_dim} found, rotary embeddings need an even one")
    return head_dim


def _refuse(key: str, found: Any, supported: tuple[Any, ...]) -> None:
    if found not in supported:
        raise ModelFormatError(f"{key}: {found!r} is not supported; supported: {', '.join(map(repr, supported))}")


def _refuse_quantised(raw: dict[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        found = raw.get(key)
        if found:
            method = found.get("quant_method", found) if isinstance(found, dict) else found
            raise ModelFormatError(f"{key}: {method!r} is not supported; use an unquantised checkpoint or a GGUF file")


def _dtype(raw: dict[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    _refuse("torch_dtype", name, DTYPES)
    return name


def _sliding_window(raw: dict[str, Any], architecture: Architecture) -> int | None:
    """The window if any layer really uses one."""
    layers = raw.get("layer_types")
    if layers is not None:
        if not isinstance(layers, list):
            raise ModelFormatError(f"layer_types: {layers!r} found, a list is wanted")
        for layer in layers:
            _refuse("layer_types", layer, LAYER_TYPES)
        is_used = "sliding_attention" in layers
    else:
        is_used = architecture.window == "always" or _flag(raw, "use_sliding_window")
        if is_used and architecture.window == "with_flag_by_layer" and raw.get("max_window_layers") is not None:
            is_used = _size(raw, "max_window_layers", low=0) < _size(raw, "num_hidden_layers")
    if not is_used or raw.get("sliding_window", architecture.default_window) is None:
        return None
    return _size(raw, "sliding_window", architecture.default_window)


def _rope(raw: dict[str, Any], head_dim: int, context_len: int) -> tuple[RopeConfig, int]:
    """The rotary embedding and the context length it allows."""
    scaling = _rope_parameters(raw)
    _refuse("partial_rotary_factor", scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor")), (1.0, None))
    theta = _number({"rope_theta": scaling.get("rope_theta", raw.get("rope_theta"))}, "rope_theta", 10000.0)
    kind: Any = _rope_kind(scaling)
    _refuse("rope_scaling.rope_type", kind, get_args(RopeKind))
    if kind == "default":
        return RopeConfig(head_dim, theta), context_len
    factor = _number(scaling, "factor")
    if kind == "linear":
        if factor < 1:
            raise ModelFormatError(f"rope_scaling.factor: {factor:g} found, linear scaling needs at least 1")
        return RopeConfig(head_dim, theta, kind, factor), int(context_len * factor)
    if kind == "dynamic":
        if head_dim == 2:
            raise ModelFormatError("rope_scaling: dynamic with head_dim 2 has no definition (it divides by head_dim - 2)")
        return RopeConfig(head_dim, theta, kind, factor, context_len), int(context_len * factor)
    if kind == "llama3":
        original = _original_context(raw, scaling, None)
        low, high = (_number(scaling, f"{side}_freq_factor") for side in ("low", "high"))
        if high <= low:
            raise ModelFormatError(f"rope_scaling: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
        rope = RopeConfig(head_dim, theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        return rope, context_len
    if theta <= 1:
        raise ModelFormatError(f"rope_theta: {theta:g} found, yarn wants a number above 1")
    return _yarn(scaling, head_dim, theta, factor, context_len, _original_context(raw, scaling, context_len))


def _original_context(raw: dict[str, Any], scaling: dict[str, Any], default: int | None) -> int:
    """Tokens before stretching; beside the rope's parameters or, which then counts, at the top."""
    at_top = raw.get("original_max_position_embeddings")
    return _size(scaling if at_top is None else raw, "original_max_position_embeddings", default)


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` or `rope_parameters`; both, if they do not contradict each other."""
    merged: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        found = raw.get(key) or {}
        if not isinstance(found, dict):
            raise ModelFormatError(f"{key}: {found!r} found, an object or null is wanted")
        nested = [name for name, value in found.items() if isinstance(value, dict)]
        if nested:
            raise ModelFormatError(f"{key}: one rope per layer type ({', '.join(nested)}) is not supported; one for all layers is")
        if found and merged and (_rope_kind(found) != _rope_kind(merged) or any(merged.get(k, v) != v for k, v in found.items())):
            raise ModelFormatError(f"rope_parameters {merged} and rope_scaling {found} contradict each other; keep rope_parameters only")
        merged |= found
    return merged


def _rope_kind(scaling: dict[str, Any]) -> Any:
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _yarn(scaling: dict[str, Any], head_dim: int, theta: float, factor: float, context_len: int, original: int) -> tuple[RopeConfig, int]:
    rope = RopeConfig(
        head_dim,
        theta,
        "yarn",
        factor,
        original,
        beta_fast=_number(scaling, "beta_fast", 32.0),
        beta_slow=_number(scaling, "beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor),
        truncate=_flag(scaling, "truncate", True),
    )
    return rope, max(context_len, int(original * factor))


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """Given outright, or from mscale and mscale_all_dim, or 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22)."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(_number(scaling, "mscale")) / scale(_number(scaling, "mscale_all_dim"))
    return scale(1.0)


def _moe(raw: dict[str, Any]) -> MoEConfig:
    num_experts = _size(raw, "num_experts", raw.get("num_local_experts"))  # the second is what transformers 5 writes
    per_token = _size(raw, "num_experts_per_tok")
    if per_token > num_experts:
        raise ModelFormatError(f"num_experts_per_tok {per_token} is more than num_experts {num_experts}")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) and layer >= 0 for layer in dense):
        raise ModelFormatError(f"mlp_only_layers: {dense!r} found, a list of layer numbers is wanted")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=_size(raw, "moe_intermediate_size"),
        is_renormalised=_flag(raw, "norm_topk_prob"),
        sparse_step=_size(raw, "decoder_sparse_step", 1),
        dense_layers=frozenset(dense),
    )
