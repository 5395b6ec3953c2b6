"""Log probabilities as the two OpenAI formats show them. Knows no request. Called by the formats of answers."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.message import TokenScore
from minisgl.server.answers import ChatLogprobs, CompletionLogprobs, ScoredToken, TokenLogprob

__all__ = ["chat_logprobs", "completion_logprobs", "scored_tokens"]

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which is not JSON."""


def token_text(data: bytes) -> str:
    """A token's text; one that is only part of a character is spelled by its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(logprob: float | None) -> float:
    return IMPOSSIBLE if logprob is None else logprob


def scored_tokens(scores: Sequence[TokenScore]) -> list[ScoredToken]:
    """Token by token, as in chats."""
    return [_scored_token(score) for score in scores]


def _scored_token(score: TokenScore) -> ScoredToken:
    top = [TokenLogprob(token_text(data), _number(logprob), list(data)) for _, data, logprob in score.top]
    return ScoredToken(token_text(score.data), _number(score.logprob), list(score.data), top)


def chat_logprobs(scores: Sequence[TokenScore]) -> ChatLogprobs:
    """The format of chat completions."""
    return ChatLogprobs(scored_tokens(scores))


def completion_logprobs(scores: Sequence[TokenScore], *, num_top: int) -> CompletionLogprobs:
    """The format of completions. The first token of an echoed prompt, at offset 0 without a probability, shows null."""
    return CompletionLogprobs(
        [token_text(score.data) for score in scores],
        [None if _is_first_of_prompt(score) else _number(score.logprob) for score in scores],
        [None if _is_first_of_prompt(score) else _alternatives(score) for score in scores] if num_top else None,
        [score.offset for score in scores],
    )


def _is_first_of_prompt(score: TokenScore) -> bool:
    return score.logprob is None and not score.top and score.offset == 0


def _alternatives(score: TokenScore) -> dict[str, float]:
    """Of tokens with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for data, logprob in [*((data, logprob) for _, data, logprob in score.top), (score.data, score.logprob)]:
        found.setdefault(token_text(data), _number(logprob))
    return found
