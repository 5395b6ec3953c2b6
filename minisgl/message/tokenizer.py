"""Messages to a tokenizer process: text to encode from the API, tokens to turn into text from scheduler rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Union

import msgspec

from minisgl.core import FinishReason, SamplingParams, TokenLogprobs
from minisgl.message.codec import make_codec
from minisgl.message.stats import SchedulerStats


class BaseTokenizerMsg(msgspec.Struct, tag=True):
    """Base of all messages to a tokenizer process."""

    encoder: ClassVar[Callable[[BaseTokenizerMsg], bytes]]
    decoder: ClassVar[Callable[[bytes], BaseTokenizerMsg]]


class TokenizeMsg(BaseTokenizerMsg):
    """A new request from the API. Exactly one of `text`, `input_ids`, `messages` is given."""

    uid: int
    """With `n` choices, the first of n uids that follow each other; each is a request of its own to the scheduler."""
    sampling_params: SamplingParams
    text: str | None = None
    """A plain prompt; special tokens are added as the tokenizer says."""
    input_ids: list[int] | None = None
    """A prompt that is tokenized already."""
    messages: list[dict[str, Any]] | None = None
    """A chat, each message with `role` and `content`; rendered by the model's chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template."""
    allow_control_tokens: bool = False
    """`messages`: the spelling of a control token in them becomes that token; otherwise it stays text."""
    add_special_tokens: bool = True
    """`text`: False leaves out those that the tokenizer puts around a text."""
    cache_salt: str | None = None
    """Cached prefixes are shared only within one salt."""
    echo: bool = False
    """Show the prompt before the output."""
    wants_token_ids: bool = False
    """Replies carry the sampled ids too."""
    only_ids: bool = False
    """Nothing is to be generated: the prompt's ids are the answer."""


class DecodeMsg(BaseTokenizerMsg):
    """The API wants the text of some ids; the answer is one `final` reply, or `rejected`."""

    uid: int
    input_ids: list[int]
    skip_special_tokens: bool = False


class TokenizedMsg(BaseTokenizerMsg):
    """What became of a `TokenizeMsg` or `DecodeMsg` that was handed to whoever tokenizes: ids, a text, or a refusal."""

    uid: int
    input_ids: bytes = b""
    """int32, as many as there are tokens"""
    text: str = ""
    """the answer to a `DecodeMsg`; of a prompt with `only_ids` its ids in JSON; of one given as ids, its text if `echo`"""
    status: int = 0
    """of a refusal, with what follows: as in `UserReply`"""
    code: str = ""
    message: str = ""
    param: str | None = None


class FlushCacheMsg(BaseTokenizerMsg):
    """The API wants the prefix cache emptied; handed on to the scheduler. The answer is one `final` reply, or `rejected`."""

    uid: int


class CacheFlushedMsg(BaseTokenizerMsg):
    """The scheduler's answer: the prefix cache is empty, or is not because `num_running` requests run."""

    uid: int
    num_running: int


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


class StatsMsg(BaseTokenizerMsg):
    """Rank 0's numbers for the API: about once a second while it works, and before it waits."""

    stats: SchedulerStats


class AbortMsg(BaseTokenizerMsg):
    """The API's client of `uid` is gone, or wants the request to end now."""

    uid: int
    wants_ending: bool = False
    """Somebody still reads: the request ends with a reply."""


_SingleMsg = Union[
    TokenizeMsg,
    TokenizedMsg,
    DetokenizeMsg,
    PromptLogprobsMsg,
    BackendReadyMsg,
    AbortMsg,
    DecodeMsg,
    FlushCacheMsg,
    CacheFlushedMsg,
    StatsMsg,
]


class BatchTokenizerMsg(BaseTokenizerMsg):
    """Several messages in one frame, handled in order: all tokens of one step travel together."""

    data: list[_SingleMsg]


_encode, _decode = make_codec(Union[_SingleMsg, BatchTokenizerMsg])
BaseTokenizerMsg.encoder = staticmethod(_encode)
BaseTokenizerMsg.decoder = staticmethod(_decode)
