"""Messages to a tokenizer process: text to encode from the API, tokens to turn into text from scheduler rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Union

import msgspec

from minisgl.core import FinishReason, SamplingParams, TokenLogprobs
from minisgl.message.codec import make_codec


class BaseTokenizerMsg(msgspec.Struct, tag=True):
    """Base of all messages to a tokenizer process."""

    encoder: ClassVar[Callable[[BaseTokenizerMsg], bytes]]
    decoder: ClassVar[Callable[[bytes], BaseTokenizerMsg]]


class TokenizeMsg(BaseTokenizerMsg):
    """A new request from the API. Exactly one of `text`, `input_ids`, `messages` is given."""

    uid: int
    sampling_params: SamplingParams
    text: str | None = None
    """A plain prompt; special tokens are added as the tokenizer says."""
    input_ids: list[int] | None = None
    """A prompt that is tokenized already."""
    messages: list[dict[str, Any]] | None = None
    """A chat, each message with `role` and `content`; rendered by the model's chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template."""


class DetokenizeMsg(BaseTokenizerMsg):
    """One sampled token of one request, or its ending without a token (`next_token` is None)."""

    uid: int
    next_token: int | None
    finished: bool = False
    finish_reason: FinishReason | None = None
    """Set when finished. `stop`: `next_token` is an end id and stays out of the text."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    logprobs: TokenLogprobs | None = None
    """Of `next_token`, if the request wants them."""
    error: str | None = None
    """For finish_reason `error`: the cause, fit for a user's eyes."""


class PromptLogprobsMsg(BaseTokenizerMsg):
    """Log probabilities of the next tokens of a prompt, in order, one chunk's at a time; the first token of a prompt has none."""

    uid: int
    logprobs: list[TokenLogprobs]


class BackendReadyMsg(BaseTokenizerMsg):
    """Sent once by rank 0 when it serves: the limits against which prompts are checked."""

    max_seq_len: int
    """Most tokens (prompt and output) of one request, from the model's context and --max-seq-len."""
    num_pool_tokens: int
    """Tokens that the whole KV pool holds."""


class AbortMsg(BaseTokenizerMsg):
    """The API's client of `uid` is gone."""

    uid: int


class BatchTokenizerMsg(BaseTokenizerMsg):
    """Several messages in one frame, handled in order: all tokens of one step travel together."""

    data: list[Union[TokenizeMsg, DetokenizeMsg, PromptLogprobsMsg, BackendReadyMsg, AbortMsg]]


_encode, _decode = make_codec(Union[TokenizeMsg, DetokenizeMsg, PromptLogprobsMsg, BackendReadyMsg, AbortMsg, BatchTokenizerMsg])
BaseTokenizerMsg.encoder = staticmethod(_encode)
BaseTokenizerMsg.decoder = staticmethod(_decode)
