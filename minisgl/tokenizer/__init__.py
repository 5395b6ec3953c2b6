"""Text to token ids and back: `tokenizer.json`, chat templates, text that is safe to show while it is still being written.

This package knows no model, no torch and no transformers: tokenizer processes, the offline class and the doctor start fast because of
it. Names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.tokenizer.detokenize import TextStream
    from minisgl.tokenizer.loader import Tokenizer, load_tokenizer

__all__ = ["TextStream", "Tokenizer", "load_tokenizer"]

_HOMES = {"TextStream": "detokenize", "Tokenizer": "loader", "load_tokenizer": "loader"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
