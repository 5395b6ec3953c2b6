"""The offline class. Loads torch on first use of `LLM` only."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.llm.llm import LLM
    from minisgl.llm.results import GenerationChunk, GenerationResult

__all__ = ["LLM", "GenerationChunk", "GenerationResult"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "torch" not in sys.modules:
        # Threads that spin while they wait starve everyone on a busy machine; OpenMP reads this when it is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from minisgl.llm import llm, results

    return getattr(llm if name == "LLM" else results, name)
