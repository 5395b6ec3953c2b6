"""Messages to the API process."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, Union

import msgspec

from minisgl.core import FinishReason
from minisgl.message.codec import make_codec
from minisgl.message.stats import SchedulerStats

ReplyKind = Literal["accepted", "rejected", "delta", "final"]


class TokenScore(msgspec.Struct, array_like=True):
    """Log probabilities at one position, with what is needed to show them; None stands for one that is not finite."""

    token_id: int
    data: bytes
    """what the token adds to a text; part of a character perhaps"""
    logprob: float | None
    offset: int = 0
    """characters of the text before it"""
    top: list[tuple[int, bytes, float | None]] = []
    """the likeliest tokens, likeliest first: id, bytes, log probability"""


class BaseFrontendMsg(msgspec.Struct, tag=True):
    """Base of all messages to the API."""

    encoder: ClassVar[Callable[[BaseFrontendMsg], bytes]]
    decoder: ClassVar[Callable[[bytes], BaseFrontendMsg]]


class UserReply(BaseFrontendMsg, omit_defaults=True):
    """What happened to `uid`: first `accepted` or `rejected`; after `accepted` any number of `delta`, then exactly one `final`."""

    uid: int
    kind: ReplyKind
    text: str = ""
    """`delta`, `final`: text that is safe to show and was not shown before. `accepted`: the prompt's, if it is to be echoed.
    Of a text that was only to be tokenized: its ids in JSON, for there may be millions, which nobody here needs one by one"""
    token_ids: list[int] = []
    """`delta`, `final`, if asked for: tokens sampled since the last reply"""
    scores: list[TokenScore] = []
    """of the tokens whose text is shown, if asked for; an end id has none. With `accepted`: the first token of an echoed prompt"""
    prompt_scores: list[TokenScore] = []
    """`delta`: of prompt tokens that are not echoed, the first one left out, if asked for"""
    num_prompt_tokens: int = 0
    """`accepted`, `final`"""
    num_completion_tokens: int = 0
    """`delta`, `final`: sampled tokens so far, the one that ended it included"""
    num_cached_tokens: int = 0
    """`final`: prompt tokens that came from the prefix cache"""
    finish_reason: FinishReason | None = None
    """`final`"""
    status: int = 0
    """`rejected`, and `final` with reason `error`: HTTP status"""
    code: str = ""
    """with `status`: the machine-readable reason"""
    message: str = ""
    """with `status`: what was found and what is allowed"""
    param: str | None = None
    """`rejected`: the field at fault, None if no single one"""


class BatchFrontendMsg(BaseFrontendMsg):
    """Several replies in one frame, in order."""

    data: list[UserReply]


class StatsReply(BaseFrontendMsg):
    """The scheduler's numbers, as it sent them in a `StatsMsg`."""

    stats: SchedulerStats


_encode, _decode = make_codec(Union[UserReply, BatchFrontendMsg, StatsReply])
BaseFrontendMsg.encoder = staticmethod(_encode)
BaseFrontendMsg.decoder = staticmethod(_decode)
