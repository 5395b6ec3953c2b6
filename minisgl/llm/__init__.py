"""The offline class. Loads torch on first use of `LLM` only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.llm.llm import LLM
    from minisgl.llm.results import GenerationChunk, GenerationResult

__all__ = ["LLM", "GenerationChunk", "GenerationResult"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from minisgl.llm import llm, results

    return getattr(llm if name == "LLM" else results, name)
