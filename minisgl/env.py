"""Environment variables that minisgl reads, each in one place. Read once, where an entry point or a constructor asks; never later:
nothing from the environment may change a schedule after the start."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["api_key", "cache_dir", "chat_history", "is_overlap_disabled", "is_pdl_disabled", "is_symmetric_memory_disabled"]


def is_overlap_disabled() -> bool:
    """MINISGL_DISABLE_OVERLAP_SCHEDULING=1: handle a step's results before the next step is planned."""
    return os.environ.get("MINISGL_DISABLE_OVERLAP_SCHEDULING", "") not in ("", "0")


def is_pdl_disabled() -> bool:
    """MINISGL_DISABLE_PDL=1: on a GPU, no kernel begins before the one before it has ended."""
    return os.environ.get("MINISGL_DISABLE_PDL", "") not in ("", "0")


def is_symmetric_memory_disabled() -> bool:
    """MINISGL_DISABLE_SYMMETRIC_MEMORY=1: several GPUs sum by NCCL only."""
    return os.environ.get("MINISGL_DISABLE_SYMMETRIC_MEMORY", "") not in ("", "0")


def cache_dir() -> Path:
    """MINISGL_CACHE, where fetched and converted models are kept; default: `minisgl` in the user's cache directory."""
    chosen = os.environ.get("MINISGL_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "minisgl"


def chat_history() -> Path:
    """Where `minisgl chat` keeps what was typed: `minisgl/chat_history` in the user's state directory, XDG_STATE_HOME."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "minisgl" / "chat_history"


def api_key() -> str | None:
    """MINISGL_API_KEY, which `minisgl chat` shows to its server and `minisgl serve` wants to see; None if it is not set."""
    return os.environ.get("MINISGL_API_KEY") or None
