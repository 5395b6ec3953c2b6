"""Small checkpoints and their logits, from transformers: for flags and sizes that the tiny models do not have.

Called by tests of loading and of the decoder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.parity import run, tiny_engine

PROMPT = [3, 41, 59, 26, 53, 58, 9, 7, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88, 41]
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA = BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def reference_model(config: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model of that config, with weights of a size that makes every part count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
    model = AutoModelForCausalLM.from_config(own, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
            else:
                parameter.normal_(0, 1 if "embed_tokens" in name else parameter.shape[-1] ** -0.5, generator=generator)
    return model


def save(model: Any, config: dict[str, Any], model_dir: Path) -> Path:
    """Write the model's weights as transformers does, and `config` as config.json."""
    model.save_pretrained(model_dir)
    (model_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model_dir


def edit_weights(model_dir: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) take out tensors of model.safetensors; `__` in a keyword stands for a dot."""
    path = model_dir / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def reference_logits(model: Any) -> torch.Tensor:
    """[len(PROMPT), V]"""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits[0]
    return logits


def our_logits(model_dir: Path, **config: Any) -> torch.Tensor:
    """Logits after each token of PROMPT, [len(PROMPT), V]: the first token is the prompt, the others are forced."""
    engine = tiny_engine(model_dir, **config)
    return run(engine, [PROMPT[:1]], len(PROMPT), forced=[[*PROMPT[1:], 0]])[0].logits
