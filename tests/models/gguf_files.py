"""Small GGUF files written on the spot, with the arrays that went into them."""

from pathlib import Path

import gguf
import numpy as np

from tests.tokenizer.fakes import byte_chars

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, EXPERTS = 64, 4, 2, 32, 96, 2, 3
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_chars(), "he", "<pad>"]
VOCAB = len(TOKENS)


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama-type files do to the rows of q and k: row i and row i + half of a head become rows 2i and 2i + 1."""
    per_head = rows.shape[0] // num_heads
    order = [
        head * per_head + half * (per_head // 2) + place for head in range(num_heads) for place in range(per_head // 2) for half in (0, 1)
    ]
    return rows[order]


def checkpoint(architecture: str, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under Hugging Face names."""
    random = np.random.default_rng(seed)

    def make(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": make(VOCAB, HIDDEN), "model.norm.weight": make(HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = make(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("k_proj", KV_HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            tensors[f"{at}self_attn.{name}.weight"] = make(rows, HIDDEN)
            if architecture == "qwen2":
                tensors[f"{at}self_attn.{name}.bias"] = make(rows)
        tensors[f"{at}self_attn.o_proj.weight"] = make(HIDDEN, HEADS * HEAD_DIM)
        tensors |= {f"{at}{name}.weight": make(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
        if architecture.startswith("qwen3"):
            tensors |= {f"{at}self_attn.{name}.weight": make(HEAD_DIM) for name in ("q_norm", "k_norm")}
        if architecture == "qwen3moe":
            tensors[f"{at}mlp.gate.weight"] = make(EXPERTS, HIDDEN)
        for inside in [f"mlp.experts.{expert}" for expert in range(EXPERTS)] if architecture == "qwen3moe" else ["mlp"]:
            tensors |= {f"{at}{inside}.{name}.weight": make(INNER, HIDDEN) for name in ("gate_proj", "up_proj")}
            tensors[f"{at}{inside}.down_proj.weight"] = make(HIDDEN, INNER)
    return tensors


def file_tensors(architecture: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same under GGUF names, in GGUF order of rows, experts stacked."""
    renamed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp"}
    inner |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
    inner |= {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"} | {
        f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")
    }
    result: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in tensors.items():
        base, kind = name.rsplit(".", 1)
        if base in renamed:
            result[f"{renamed[base]}.{kind}"] = values
            continue
        _, _, layer, rest = base.split(".", 3)
        if rest.startswith("mlp.experts."):
            stacks.setdefault(f"blk.{layer}.ffn_{rest.rsplit('.', 1)[1].removesuffix('_proj')}_exps.weight", []).append(values)
            continue
        if architecture == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
            result[f"blk.{layer}.{inner[rest]}.{kind}"] = interleave(values, HEADS if rest == "self_attn.q_proj" else KV_HEADS)
        else:
            result[f"blk.{layer}.{inner[rest]}.{kind}"] = values
    return result | {name: np.stack(values) for name, values in stacks.items()}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tied: bool = False,
    quantised: gguf.GGMLQuantizationType | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    extra_keys: dict[str, int | float | str | bool] | None = None,
    pre: str = "smollm",
) -> dict[str, np.ndarray]:
    """Write a file; returns the checkpoint that it stands for (after quantisation). `quantised` applies to all matrices."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if architecture == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(INNER)
    add_vocabulary(writer, pre)
    for key, value in (extra_keys or {}).items():
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    meant = checkpoint(architecture, tied)
    if quantised is not None:
        meant = {name: rounded(values, quantised) if values.ndim > 1 else values for name, values in meant.items()}
    for name, values in (file_tensors(architecture, meant) | (extra_tensors or {})).items():
        if quantised is not None and values.ndim > 1:
            writer.add_tensor(name, gguf.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def rounded(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """What a reader sees of `values` stored as `kind`. Rows are quantised on their own, so their order does not matter."""
    return gguf.dequantize(gguf.quantize(values, kind), kind).astype(np.float32)


def add_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * 257, 5])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT)
