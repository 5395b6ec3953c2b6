"""How much memory the largest step of an engine takes: it runs once, on padding, before the KV pool is made.

Knows the engine's interface and the allocator of the device. Called by the engine's maker, on a GPU.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from minisgl.core import Batch, SamplingParams, SlotSetup, make_batch
from minisgl.engine.base import EngineLimits, StepHandle

__all__ = ["largest_batch", "measure_step"]

DEMANDING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20)
"""Parameters that make the sampler use all the memory it ever uses."""


class _Engine(Protocol):
    @property
    def limits(self) -> EngineLimits: ...

    def submit(self, batch: Batch) -> StepHandle: ...


def measure_step(engine: _Engine, num_tokens: int, *, has_decode_step: bool) -> int:
    """Bytes that a step of `num_tokens` new tokens takes at its peak, and with `has_decode_step` what one token of each row takes besides.
    The engine has a pool of one page, which nobody reads.

    The first step also loads kernels and makes the ranks' buffers, which torch's allocator does not know, but the device does.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for size in (num_tokens, engine.limits.max_running_req)[: 1 + has_decode_step]:
        engine.submit(largest_batch(engine.limits, size)).read()
    torch.cuda.synchronize()
    peak = max(torch.cuda.max_memory_allocated() - allocated, free - torch.cuda.mem_get_info()[0])
    torch.cuda.empty_cache()
    return peak


def largest_batch(limits: EngineLimits, num_tokens: int, params: SamplingParams = DEMANDING) -> Batch:
    """A prefill step of `num_tokens` tokens, as many rows as may run, all of which sample; K and V go to the dummy page."""
    num_rows = min(limits.max_running_req, num_tokens)
    extend = np.full(num_rows, num_tokens // num_rows, dtype=np.int32)
    extend[: num_tokens % num_rows] += 1
    extend = np.minimum(extend, limits.max_seq_len - 1)
    slots, zeros = np.arange(num_rows, dtype=np.int32), np.zeros(int(extend.sum()), dtype=np.int32)
    nothing = np.empty(0, dtype=np.int32)
    arrays = {
        "slots": slots,
        "cached_lens": np.zeros(num_rows, dtype=np.int32),
        "extend_lens": extend,
        "input_ids": zeros,
        "positions": np.concatenate([np.arange(count, dtype=np.int32) for count in extend]),
        "write_slots": np.full_like(zeros, limits.num_pages * limits.page_size),
        "sample_rows": slots,
    }
    setups = tuple(SlotSetup(slot, params, slot, frozenset(), nothing, nothing) for slot in range(num_rows))
    return make_batch(0, tuple(range(num_rows)), arrays, setups)
