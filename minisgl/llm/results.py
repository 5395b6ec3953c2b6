"""What the offline class returns."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.core import FinishReason, TokenLogprobs

__all__ = ["GenerationChunk", "GenerationResult"]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished request."""

    text: str
    """The output's text; empty if the model directory has no tokenizer."""
    token_ids: list[int]
    """All sampled tokens, the one that ended the request included."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose K/V came from the prefix cache."""
    logprobs: list[TokenLogprobs] | None = None
    """One per sampled token, if the request asked for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One per prompt token but the first, if the request asked for them."""
    choices: tuple[GenerationResult, ...] = ()
    """With `n` above 1: all n outputs, of which this one is the first."""
    error: str | None = None
    """Why the request was refused or broken off; None if it was not."""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of a streamed output."""

    text: str
    """Text that was not shown before; may be empty."""
    token_ids: list[int]
    """Tokens sampled since the last chunk."""
    result: GenerationResult | None = None
    """The whole, in the last chunk only."""
