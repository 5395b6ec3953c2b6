"""Sampling parameters for fields that a request leaves out: the model's generation_config.json, or OpenAI's. Called by the API process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.core import SamplingParams
from minisgl.errors import InvalidInputError, ModelFormatError

__all__ = ["SamplingDefaults", "read_defaults"]

CONFIG_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """`values`: fields of SamplingParams that a request may leave out; `source` says whose they are."""

    values: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    source: str = "OpenAI's, for the model has none"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items()) + f" ({self.source})"


def read_defaults(model_dir: str | Path) -> SamplingDefaults:
    """What the model's generation_config.json recommends: `do_sample: false` is greedy. Raises ModelFormatError if it is out of range."""
    path = Path(model_dir) / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        found = {name: config[name] for name in CONFIG_FIELDS if config.get(name) is not None}
        if config.get("do_sample") is False:
            found["temperature"] = 0.0
        SamplingParams(**found)
    except (InvalidInputError, ValueError, TypeError, AttributeError) as error:
        raise ModelFormatError(f"{path}: {error}") from error
    return SamplingDefaults({"temperature": 1.0, **found}, "generation_config.json") if found else SamplingDefaults()
