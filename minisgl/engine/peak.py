"""How much memory the largest step of an engine takes: it runs once, on padding, before the KV pool is made.

Knows the engine's interface and the allocator of the device. Called by the engine's maker, on a GPU.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from minisgl.core import NO_INT32, Batch, SamplingParams, SlotSetup, make_batch
from minisgl.engine.base import EngineLimits, StepHandle
from minisgl.engine.logprobs import PROMPT_LOGITS

__all__ = ["largest_batch", "measure_step"]

DEMANDING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20)
"""Parameters that make the sampler use all the memory it ever uses, and log probabilities of prompts wanted where those of tokens are."""


class _Engine(Protocol):
    @property
    def limits(self) -> EngineLimits: ...

    def submit(self, batch: Batch) -> StepHandle: ...


def measure_step(engine: _Engine, num_tokens: int) -> int:
    """Bytes that a step of `num_tokens` new tokens takes at its peak, or one token of each row, and what that one keeps. The engine has a
    pool of one page, which nobody reads.

    The first step also loads kernels and makes the ranks' buffers, which torch's allocator does not know, but the device does.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for size in (engine.limits.max_running_req, num_tokens):
        engine.submit(largest_batch(engine.limits, size)).read()
    torch.cuda.synchronize()
    peak = max(torch.cuda.max_memory_allocated() - allocated, free - torch.cuda.mem_get_info()[0])
    torch.cuda.empty_cache()
    return peak


def largest_batch(limits: EngineLimits, num_tokens: int, params: SamplingParams = DEMANDING) -> Batch:
    """A prefill step of `num_tokens` tokens, as many rows as may run, all of which sample; K and V go to the dummy page. Where `params`
    want log probabilities, as many prompt tokens as are computed together have them too."""
    num_rows = min(limits.max_running_req, num_tokens)
    extend = np.full(num_rows, num_tokens // num_rows, dtype=np.int32)
    extend[: num_tokens % num_rows] += 1
    extend = np.minimum(extend, limits.max_seq_len - 1)
    slots, zeros = np.arange(num_rows, dtype=np.int32), np.zeros(int(extend.sum()), dtype=np.int32)
    num_scored = 0 if params.logprobs is None else min(PROMPT_LOGITS, len(zeros))
    target = np.array([0, 0, params.logprobs or 0], dtype=np.int32)
    arrays = {
        "slots": slots,
        "cached_lens": np.zeros(num_rows, dtype=np.int32),
        "extend_lens": extend,
        "input_ids": zeros,
        "positions": np.concatenate([np.arange(count, dtype=np.int32) for count in extend]),
        "write_slots": np.full_like(zeros, limits.num_pages * limits.page_size),
        "sample_rows": slots,
        "prompt_targets": np.tile(target, (num_scored, 1)),
    }
    setups = tuple(SlotSetup(slot, params, slot, frozenset(), NO_INT32, NO_INT32) for slot in range(num_rows))
    return make_batch(0, tuple(range(num_rows)), arrays, setups)
