"""What this machine is and what is installed on it, as plain values for reports. Loads torch when asked, never before.

Knows no model and no engine. Called by the programs of this package.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["OPTIONAL", "REQUIRED", "hardware", "installed"]

REQUIRED = (
    *("minisgl", "torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "gguf", "filelock", "tqdm", "jinja2"),
    *("msgspec", "pyzmq", "starlette", "uvicorn", "h11", "pyyaml", "prompt_toolkit", "rich", "prometheus-client"),
)
OPTIONAL = {
    "triton": "kernels for CUDA",
    "flashinfer-python": "attention backend for CUDA",
    "flash-attn-3": "attention backend for CUDA",
    "flash-attn-4": "attention backend for CUDA",
    "sgl-kernel": "attention backend for CUDA",
    "uvloop": "a faster event loop for the server",
    "transformers": "only our tests use it",
}
"""distribution -> what it is good for"""


def installed(name: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Everything installed that may matter, Python first."""
    found = {name: installed(name) for name in (*REQUIRED, *OPTIONAL)}
    return {"python": platform.python_version()} | {name: number for name, number in found.items() if number is not None}


def hardware() -> dict[str, Any]:
    """The processor, its memory in bytes, the threads torch uses, and the GPUs with theirs."""
    import torch

    return {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "num_cpus": num_usable_cpus(),
        "num_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [
            {"name": properties.name, "memory_bytes": properties.total_memory, "capability": f"{properties.major}.{properties.minor}"}
            for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ],
        "cuda": torch.version.cuda,
    }


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def num_usable_cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
