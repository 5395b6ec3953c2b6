"""What clients receive, as typed Structs: the fields are the wire format. Knows nothing of how it comes about. Called by the routes."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.core import FinishReason

__all__ = [
    "AbortAnswer",
    "Answer",
    "AnswerChoice",
    "AnswerMessage",
    "ChatLogprobs",
    "Chunk",
    "ChunkChoice",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Delta",
    "Generation",
    "GenerationChunk",
    "Model",
    "ModelList",
    "Progress",
    "PromptTokensDetails",
    "ScoredToken",
    "Status",
    "TextAnswer",
    "TokenLogprob",
    "TokensAnswer",
    "Usage",
    "Version",
]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompts' tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request: each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token that might stand at a place."""

    token: str
    """Its text; `bytes:\\xe4…` if it is only part of a character."""
    logprob: float
    """Natural logarithm; -9999 for one that cannot be sampled."""
    bytes: list[int]


class ScoredToken(TokenLogprob, frozen=True):
    """The token that stands there."""

    top_logprobs: list[TokenLogprob]
    """the likeliest ones, likeliest first"""


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a message's tokens; the id that ended it is none of them."""

    content: list[ScoredToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a completion's tokens, and of the prompt's if it is echoed; the id that ended it is none of them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt"""
    top_logprobs: list[dict[str, float] | None] | None
    """the likeliest tokens and the one that stands there"""
    text_offset: list[int]
    """characters of the text before the token"""


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    """One answer."""

    message: AnswerMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: list[ScoredToken] | UnsetType = UNSET
    """Left out unless asked for; none for the prompt's first token."""


class Answer(msgspec.Struct, frozen=True):
    """The body of a whole chat completion."""

    id: str
    created: int
    """seconds since 1970"""
    model: str
    choices: list[AnswerChoice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """What a chunk adds to one answer."""

    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a streamed answer. Id, created and model are the same in all of them."""

    id: str
    created: int
    """seconds since 1970"""
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    """Left out unless asked for; then null in all chunks but the last."""
    object: str = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion, or what a chunk adds to it. Choices are in order of prompts, then of choices."""

    text: str
    index: int
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[ScoredToken] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The body of whole completions, or one event of streamed ones."""

    id: str
    created: int
    """seconds since 1970"""
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class Generation(msgspec.Struct, frozen=True):
    """The body of an answer of /generate."""

    id: str
    text: str
    token_ids: list[int]
    """All sampled tokens, the one that ended the output included."""
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[ScoredToken] | UnsetType = UNSET
    """Left out unless asked for; the id that ended the output has none."""
    prompt_logprobs: list[ScoredToken] | UnsetType = UNSET


class GenerationChunk(msgspec.Struct, frozen=True):
    """One event of a streamed answer of /generate: what is new. The ending and the usage are in the last."""

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: list[ScoredToken] | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True):
    """A served model."""

    id: str
    created: int
    """seconds since 1970"""
    object: str = "model"
    owned_by: str = "minisgl"


class ModelList(msgspec.Struct, frozen=True):
    """The body of GET /v1/models."""

    data: list[Model]
    object: str = "list"


class TokensAnswer(msgspec.Struct, frozen=True):
    """The body of an answer of /tokenize."""

    tokens: list[int]
    count: int


class TextAnswer(msgspec.Struct, frozen=True):
    """The body of an answer of /detokenize."""

    text: str


class Version(msgspec.Struct, frozen=True):
    """The body of GET /version."""

    version: str


class AbortAnswer(msgspec.Struct, frozen=True):
    """The body of an answer of /abort."""

    aborted: int
    """outputs that were ended by it"""


class Status(msgspec.Struct, frozen=True):
    """The body of an answer that says only that all is well."""

    status: str = "ok"


class Progress(msgspec.Struct, frozen=True):
    """The body of GET /health/progress."""

    num_requests: int
    """prompts times choices whose answers are not complete"""
    num_steps: int
    """steps of the model begun since the start, by the rank that has begun fewest"""
    status: str = "ok"
