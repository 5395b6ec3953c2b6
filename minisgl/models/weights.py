"""Fills a model's parameters from a checkpoint: streamed, cut by name, nothing missing, nothing extra.

At most one checkpoint tensor exists beside the model: of a matrix that is cut over ranks, only this rank's part is read. Knows
safetensors and parameter names; no requests, no scheduler. Called by the engine.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minisgl.distributed import DistributedInfo
from minisgl.errors import ModelFormatError
from minisgl.layers.base import BaseOP, check_names, check_shape
from minisgl.layers.embedding import vocab_block
from minisgl.models.config import ModelConfig

__all__ = ["digest_whole", "fill_dummy", "load_weights", "shard_range"]

DUMMY_STD = 0.02
IGNORED = (".rotary_emb.inv_freq",)
"""Buffers that some checkpoints carry and that are computed, not loaded."""


def load_weights(model: BaseOP, model_dir: Path, config: ModelConfig, tp: DistributedInfo) -> None:
    """Stream the safetensors of `model_dir` into `model`. Raises ModelFormatError naming tensor, file and shapes."""
    files = _weight_files(model_dir)
    targets = model.state_dict()
    wanted = set(targets)
    found = {name for name in files if not name.endswith(IGNORED)}
    if config.is_tied:
        found.discard("lm_head.weight")
    elif "lm_head.weight" not in found:
        raise ModelFormatError("lm_head.weight is missing and tie_word_embeddings is not true: the model has no head")
    check_names(wanted, found)
    by_file: dict[Path, list[str]] = {}
    for name in sorted(found):
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        _load_file(path, names, targets, config, tp)


def _load_file(path: Path, names: list[str], targets: dict[str, torch.Tensor], config: ModelConfig, tp: DistributedInfo) -> None:
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in names:
                target = targets[name]
                tensor = _read(file, name, config, tp)
                check_shape(f"{path.name}: {name}", tensor, target)
                if not tensor.dtype.is_floating_point:
                    raise ModelFormatError(f"{path.name}: {name} has type {tensor.dtype}, a floating-point type is wanted")
                target.copy_(tensor)
    except SafetensorError as error:
        raise ModelFormatError(f"{path}: {error}; the file is truncated or not safetensors") from error


def _read(file: Any, name: str, config: ModelConfig, tp: DistributedInfo) -> torch.Tensor:
    """This rank's part of one tensor."""
    if tp.size == 1:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor
    piece = file.get_slice(name)
    shape = piece.get_shape()
    dim, start, end = shard_range(name, shape, config.attention.num_kv_heads, tp)
    if dim is None:
        return torch.as_tensor(file.get_tensor(name))
    return torch.as_tensor(piece[start:end] if dim == 0 else piece[:, start:end])


def shard_range(name: str, shape: list[int], num_kv_heads: int, tp: DistributedInfo) -> tuple[int | None, int, int]:
    """What rank r of n keeps of a checkpoint tensor: (dimension or None for all of it, first index, one past the last)."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in ("lm_head", "embed_tokens"):
        return (0, *vocab_block(shape[0], tp.rank, tp.size))
    if layer in ("k_proj", "v_proj") and num_kv_heads < tp.size:
        head_dim = shape[0] // num_kv_heads
        head = tp.rank * num_kv_heads // tp.size
        return 0, head * head_dim, (head + 1) * head_dim
    if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        dim = 0
    elif layer in ("o_proj", "down_proj") and kind == "weight":
        dim = 1
    else:
        return None, 0, 0
    if shape[dim] % tp.size:
        raise ModelFormatError(f"{name}: dimension {dim} of {shape} cannot be split evenly over {tp.size} ranks")
    size = shape[dim] // tp.size
    return dim, tp.rank * size, (tp.rank + 1) * size


def digest_whole(model: BaseOP) -> dict[str, int]:
    """A 64-bit digest of each parameter that no rank cuts, by name: the same on all ranks that have read the same files."""
    one = DistributedInfo(0, 1)
    whole = {name: t for name, t in model.state_dict().items() if shard_range(name, list(t.shape), one.size, one)[0] is None}
    blocks = {name: tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy() for name, tensor in whole.items()}
    return {
        name: int.from_bytes(hashlib.blake2b(block.tobytes(), digest_size=8).digest(), "little", signed=True)
        for name, block in blocks.items()
    }


def fill_dummy(model: BaseOP, seed: int) -> None:
    """Random weights of standard deviation 0.02 (norm gains 1), for speed measurements. The same seed gives the same weights."""
    parameters = model.state_dict()
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device=device)
    for name, tensor in parameters.items():
        # by name, so that what is not cut is the same on all ranks, whatever the sizes of the cut ones
        generator.manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, DUMMY_STD, generator=generator)


def _weight_files(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> file. The index decides where there is one; other files beside it are strays."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        return _from_index(index)
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        others = ", ".join(sorted(p.name for p in model_dir.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))[:5])
        hint = f"; found {others}, which is not read from a directory" if others else ""
        raise ModelFormatError(f"{model_dir} holds no .safetensors file{hint}")
    single = model_dir / "model.safetensors"
    if len(paths) > 1 and not single.exists():
        names = ", ".join(p.name for p in paths[:5])
        raise ModelFormatError(f"{model_dir} holds {len(paths)} safetensors files ({names}) and no model.safetensors.index.json")
    path = single if single.exists() else paths[0]
    return dict.fromkeys(_names(path), path)


def _from_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / _inside(index, file) for name, file in weight_map.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ModelFormatError(f"{index} is not an index of weights: {error}") from error
    missing = sorted({path.name for path in files.values() if not path.exists()})
    if missing:
        raise ModelFormatError(f"{index.name} names files that are not there: {', '.join(missing)}")
    present = {path: set(_names(path)) for path in set(files.values())}
    for name, path in sorted(files.items()):
        if name not in present[path]:
            raise ModelFormatError(f"{index.name} says that {name} is in {path.name}, which does not hold it")
    return files


def _inside(index: Path, file: Any) -> str:
    """`file` as the index names it; ModelFormatError if it leads out of the model directory."""
    if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
        raise ModelFormatError(f"{index.name} names the file {file!r}; files of the model's own directory are allowed")
    return file


def _names(path: Path) -> Iterator[str]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield from file.keys()
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path}: {error}; the file is truncated or not safetensors") from error
