"""How many KV pages fit: the memory plan. Knows sizes and the machine, no requests.

Every rank computes its own; the engine takes the minimum over the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl.engine.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import bytes_per_page
from minisgl.layers.attention import local_kv_heads
from minisgl.models.config import ModelConfig

__all__ = [
    "MAX_EXTEND_GRAPH_TOKENS",
    "MemoryPlan",
    "available_bytes",
    "extend_graph_bytes",
    "extend_graph_rows",
    "extend_graph_size",
    "extend_graph_sizes",
    "graph_bytes",
    "graph_size",
    "graph_sizes",
    "plan_memory",
]

DEFAULT_RATIO = {"cpu": 0.3, "cuda": 0.9}
"""Share of the memory that is available before the model is loaded; a CPU's memory is not ours alone."""
BYTES_PER_GRAPH = 8 * 2**20
MAX_EXTEND_GRAPH_TOKENS, MAX_EXTEND_GRAPH_ROWS = 2048, 32
"""Larger prefill steps are launched one kernel after the other: they take the device longer than the host."""
WORKSPACE_BYTES = 32 * 2**20
"""Of cuBLAS, for the stream that graphs are captured on."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the KV pool gets."""

    available_bytes: int
    """free memory of the device before weights"""
    weight_bytes: int
    step_bytes: int
    """what the largest step and the CUDA graphs take besides; 0 on a CPU, whose pool takes a small share of the memory"""
    page_bytes: int
    """K and V of one page over all layers of this rank"""
    num_pages: int

    def __str__(self) -> str:
        pool = self.num_pages * self.page_bytes
        steps = f"steps {self.step_bytes / 2**20:,.0f} MiB, " if self.step_bytes else ""
        return (
            f"weights {self.weight_bytes / 2**20:,.0f} MiB, {steps}KV pool {pool / 2**20:,.0f} MiB ({self.num_pages:,} pages of "
            f"{self.page_bytes / 2**10:,.0f} KiB), {self.available_bytes / 2**20:,.0f} MiB were available"
        )


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def graph_size(num_rows: int) -> int:
    """Rows of the graph that serves a step of `num_rows`: 1, 2, 4, then steps of 8 to 64, of 16 beyond."""
    for size in (1, 2, 4):
        if num_rows <= size:
            return size
    step = 8 if num_rows <= 64 else 16
    return -(-num_rows // step) * step


def graph_sizes(max_rows: int) -> list[int]:
    """All sizes that steps of at most `max_rows` rows need."""
    return sorted({graph_size(num_rows) for num_rows in range(1, max_rows + 1)})


def extend_graph_size(num_tokens: int) -> int:
    """Tokens of the graph that serves a prefill step of `num_tokens`: 64, then steps of 128 to 1,024, of 256 beyond."""
    if num_tokens <= 64:
        return 64
    step = 128 if num_tokens <= 1024 else 256
    return -(-num_tokens // step) * step


def extend_graph_sizes(max_tokens: int) -> list[int]:
    """All sizes that prefill steps of at most `max_tokens` new tokens need."""
    return sorted({extend_graph_size(count) for count in range(1, max_tokens + 1)})


def extend_graph_rows(max_running_req: int) -> int:
    """Rows for which the graph of a prefill step has room."""
    return min(MAX_EXTEND_GRAPH_ROWS, graph_size(max_running_req))


def extend_graph_bytes(max_tokens: int, num_rows: int, share_of_step: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes that CUDA graphs of up to `max_tokens` new tokens keep: `share_of_step`, which such a step takes and all share, and the rest
    as `graph_bytes`."""
    sizes = extend_graph_sizes(max_tokens)
    return share_of_step + graph_bytes([num_rows] * len(sizes), vocab_size, dtype) if sizes else 0


def graph_bytes(sizes: Iterable[int], vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes that CUDA graphs of so many rows keep: their logits, what a graph takes by itself, and one workspace for all."""
    per_graph = [size * vocab_size * dtype.itemsize + BYTES_PER_GRAPH for size in sizes]
    return sum(per_graph) + WORKSPACE_BYTES if per_graph else 0


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    page_size: int,
    available: int,
    weight_bytes: int,
    device_type: str,
    step_bytes: int = 0,
) -> MemoryPlan:
    """Pages as asked for by `num_pages`, or what the memory left after the weights holds and requests could use.

    Raises ConfigError with the numbers if not one page fits.
    """
    attention = model.attention
    kv_heads = local_kv_heads(attention.num_kv_heads, config.tp_info.size)
    page_bytes = bytes_per_page(model.num_layers, kv_heads, page_size, attention.head_dim, dtype)
    if config.num_pages:
        return MemoryPlan(available, weight_bytes, step_bytes, page_bytes, config.num_pages)
    ratio = config.memory_ratio or DEFAULT_RATIO[device_type]
    budget = int(available * ratio) - weight_bytes - step_bytes
    longest = config.max_seq_len or model.context_len
    usable = config.max_running_req * -(-longest // page_size)
    num_pages = min(budget // page_bytes - 1, usable)
    if num_pages < 1:
        raise ConfigError(
            f"no memory for the KV pool: {available / 2**20:,.0f} MiB available, of which --memory-ratio {ratio:g} may be used, "
            f"weights take {weight_bytes / 2**20:,.0f} MiB, steps {step_bytes / 2**20:,.0f} MiB and a page {page_bytes / 2**20:,.2f} MiB; "
            f"raise --memory-ratio{', lower --max-extend-tokens' if step_bytes else ''} or free memory"
        )
    return MemoryPlan(available, weight_bytes, step_bytes, page_bytes, num_pages)
