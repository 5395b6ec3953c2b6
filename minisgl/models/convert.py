"""A GGUF file to a model directory: model.safetensors, tokenizer.json, tokenizer_config.json, config.json, generation_config.json.

Reading GGUF takes seconds at each start; a directory is mapped at once, and everything else in minisgl then knows one format. Nothing
is rounded: a tensor is stored in the smallest type that holds its dequantised values exactly (float32 for quantised ones, whose
scale * level + offset fits neither float16 nor bfloat16). One tensor is in memory at a time.

Knows neither torch nor transformers. Called by `embedded` and `resolve`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from minisgl.errors import ModelFormatError
from minisgl.models.gguf import FloatArray, GGUFTensor, StoredType, open_gguf
from minisgl.tokenizer.gguf_vocab import gguf_end_ids, gguf_tokenizer_files

__all__ = ["convert_gguf"]

NUM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def convert_gguf(gguf_path: str | Path, out_dir: str | Path, progress: bool = False) -> None:
    """Write the model directory of a GGUF file into `out_dir`, made if missing. `progress` draws a bar on stderr.

    Raises ModelFormatError for what cannot be served; then `out_dir` may hold some of the files.
    """
    # 1. Read the header; refuse what we cannot serve before anything large is written.
    model = open_gguf(gguf_path)
    config = model.config()
    tokenizer, tokenizer_config = gguf_tokenizer_files(model.metadata, str(gguf_path))
    num_tokens = len(model.metadata["tokenizer.ggml.tokens"])
    if num_tokens > config["vocab_size"]:
        raise ModelFormatError(f"{gguf_path}: the vocabulary has {num_tokens} tokens, the embedding only {config['vocab_size']} rows")
    tensors = model.checkpoint()
    # 2. Weights, one by one.
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_safetensors(out_dir / "model.safetensors", tensors, progress)
    # 3. The small files.
    end_ids = gguf_end_ids(model.metadata, str(gguf_path))
    generation_config = {"bos_token_id": config["bos_token_id"], "eos_token_id": end_ids if len(end_ids) != 1 else end_ids[0]}
    _write_json(out_dir / "tokenizer.json", tokenizer)
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config | {"model_max_length": config["max_position_embeddings"]})
    _write_json(out_dir / "generation_config.json", {key: value for key, value in generation_config.items() if value not in (None, [])})
    _write_json(out_dir / "config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _write_safetensors(path: Path, tensors: list[GGUFTensor], progress: bool) -> None:
    """The safetensors library writes only what is in memory as a whole, hence this: 8 bytes of header length, a JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * NUM_BYTES[tensor.stored]
        header[tensor.name] = {"dtype": tensor.stored, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, tqdm(total=end, unit="B", unit_scale=True, desc="Converting", disable=not progress) as bar:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = _exactly(tensor.read(), tensor.stored)
            file.write(data.data)
            bar.update(data.nbytes)


def _exactly(values: FloatArray, stored: StoredType) -> npt.NDArray[Any]:
    """`values` in a type that holds them without rounding, little-endian. bfloat16 is the upper half of a float32."""
    if stored == "F16":
        return values.astype("<f2")
    if stored == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2")
    return values.astype("<f4", copy=False)
