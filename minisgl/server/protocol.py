"""What clients send and receive, as typed Structs: the fields are the wire format, checked while decoding.

Decoding is strict: an unknown field is an error that names it, a bool is no int, NaN and unpaired surrogates are not JSON. Knows no
socket and no message. Called by the routes.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.core import FinishReason, SamplingParams
from minisgl.errors import RequestError

__all__ = [
    "Answer",
    "AnswerChoice",
    "AnswerMessage",
    "ChatRequest",
    "Chunk",
    "ChunkChoice",
    "Delta",
    "Model",
    "ModelList",
    "PromptTokensDetails",
    "Usage",
    "decode_body",
]

T = TypeVar("T")

PATH = re.compile(r"^(.*) - at (?:`key` in )?`\$\.?(.*)`$")
"""msgspec's way of saying where."""
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`")

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
"""Fields of chat requests that this version does not serve -> values, besides null, that ask for nothing and are accepted."""

SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
)
"""Fields that are handed to SamplingParams, which checks their ranges; null is its default."""


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat. How far roles and tool calls go is the chat template's business."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    """A text, or parts of type `text`."""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Send one more chunk, with the usage and without choices, before the end."""


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    model: str | None = None
    """The served model's name; may be left out."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    """Most tokens of the answer; null: the rest of the context."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens."""
    temperature: float | None = None
    """null is 0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """null: a random one, so that the answer differs from time to time."""
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # Bookkeeping of the client's: accepted, without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    # Not served yet; see NEUTRAL_VALUES.
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def check(self) -> None:
        """Raise RequestError naming the first field whose value this version does not serve."""
        if not self.messages:
            raise RequestError("messages: an empty list found; at least one message is wanted", param="messages")
        for name, neutral in NEUTRAL_VALUES.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise RequestError(
                    f"{name}: this value is not supported by this version; leave the field out", param=name, code="unsupported"
                )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: found without stream; it is allowed with stream=true only", param="stream_options")

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError naming the field."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        if len(set(limits)) > 1:
            raise RequestError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        given.setdefault("seed", secrets.randbits(64))
        return SamplingParams(max_tokens=limits[0] if limits else None, **given)

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as the tokenizer wants them, without the fields that are null."""
        plain: list[dict[str, Any]] = msgspec.to_builtins(self.messages)
        return plain


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    logprobs: None = None


class Answer(msgspec.Struct, frozen=True):
    """The body of a whole answer."""

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
    logprobs: None = None


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


def decode_body(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`. Raises RequestError: not JSON, or a field that is unknown, missing or of the wrong type, by name."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _field_error(text: str) -> RequestError:
    """msgspec's words, with the field first."""
    match = PATH.match(text)
    what, path = match.groups() if match else (text, "")
    unknown = UNKNOWN_FIELD.match(what)
    if unknown:
        path, what = f"{path}.{unknown[1]}".strip("."), "this field is unknown or not supported"
    param = re.split(r"[.\[]", path)[0] or None
    return RequestError(f"{path}: {what}" if path else f"the body: {what}", param=param)
