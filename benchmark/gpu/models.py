"""Model directories for speed measurements: a config.json each, no weights and no tokenizer (`--dummy-weight`, prompts as ids).

python benchmark/gpu/models.py FOLDER          writes FOLDER/qwen3-0.6b, FOLDER/qwen3-14b, ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, False),
    "qwen3-14b": (5120, 40, 40, 8, 17408, False),
    "qwen3-32b": (5120, 64, 64, 8, 25600, False),
    "qwen3-30b-a3b": (2048, 48, 32, 4, 6144, False),
}
"""hidden size, layers, heads, KV heads, intermediate size, tied"""


def write(folder: Path) -> None:
    """One directory per model; those that are there are written again."""
    for name, (hidden, layers, heads, kv_heads, intermediate, is_tied) in SIZES.items():
        sizes = {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": intermediate,
            "tie_word_embeddings": is_tied,
        }
        directory = folder / name
        directory.mkdir(parents=True, exist_ok=True)
        config = {**QWEN3, **sizes, **(MOE if "a3b" in name else {})}
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
