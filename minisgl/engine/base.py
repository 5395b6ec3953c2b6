"""The seam between scheduler and engine: a plan goes in, tokens come out. Tests put a fake engine behind it.

Imports no model code, so that a scheduler can be driven without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from minisgl.core import Batch, Int32Array, TokenLogprobs

__all__ = ["BaseEngine", "EngineLimits", "StepHandle", "StepLogprobs"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine offers, in numbers. Equal on all ranks."""

    num_pages: int
    """pages that requests may use"""
    page_size: int
    """tokens per page"""
    max_seq_len: int
    """most tokens of one sequence, prompt and output"""
    max_running_req: int
    """rows of the page table"""
    vocab_size: int
    """token ids below this are legal input"""
    num_known_ids: int = 2**31 - 1
    """token ids from here on are padding of the vocabulary and never sampled"""
    end_ids: frozenset[int] = frozenset()
    """token ids that end a sequence unless a request ignores them"""
    device_type: Literal["cpu", "cuda"] = "cpu"
    is_asynchronous: bool = False
    """`submit` returns before the step is computed, so that planning the next one costs no time"""

    @property
    def num_pool_tokens(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log probabilities of one step."""

    sampled: tuple[TokenLogprobs | None, ...]
    """[S] None for a request that does not want them"""
    prompt: tuple[TokenLogprobs, ...]
    """[L] in the order of `Batch.prompt_targets`"""


class StepHandle(Protocol):
    """A launched step."""

    def read(self) -> Int32Array:
        """Wait for the step; int32 [S], the tokens sampled for `Batch.sample_rows` in order; -1 for a row whose logits are not
        finite. Called once."""

    def read_logprobs(self) -> StepLogprobs:
        """After `read`, and only if a request of the step wants log probabilities."""


class BaseEngine(Protocol):
    """Computes plans in the order of their submission."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def cpu_group(self) -> Any:
        """The gloo process group of all ranks; None for one rank."""

    def submit(self, batch: Batch) -> StepHandle:
        """Launch one step."""

    def close(self) -> None:
        """Give back what other ranks or the system would keep."""
