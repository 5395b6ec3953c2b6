"""The messages between API, tokenizer and scheduler processes. The declared fields are the wire format, checked on decoding.

Each base is one tagged union with an `encoder` (message -> bytes) and a `decoder` (bytes -> message). The decoder raises
`msgspec.MsgspecError` for a frame that is not such a message; whoever reads a socket logs and drops it. No pickle, and nothing that a
user sends can choose a message type: free-form values stay dicts, lists and strings.

torch is imported only when a message that carries a tensor is decoded.
"""

from minisgl.message.backend import AbortBackendMsg, BaseBackendMsg, BatchBackendMsg, ExitMsg, FlushBackendMsg, UserMsg
from minisgl.message.frontend import BaseFrontendMsg, BatchFrontendMsg, ReplyKind, StatsReply, TokenScore, UserReply
from minisgl.message.stats import Histogram, SchedulerStats
from minisgl.message.tokenizer import (
    AbortMsg,
    BackendReadyMsg,
    BaseTokenizerMsg,
    BatchTokenizerMsg,
    CacheFlushedMsg,
    DecodeMsg,
    DetokenizeMsg,
    FlushCacheMsg,
    PromptLogprobsMsg,
    StatsMsg,
    TokenizedMsg,
    TokenizeMsg,
)

__all__ = [
    "AbortBackendMsg",
    "AbortMsg",
    "BackendReadyMsg",
    "BaseBackendMsg",
    "BaseFrontendMsg",
    "BaseTokenizerMsg",
    "BatchBackendMsg",
    "BatchFrontendMsg",
    "BatchTokenizerMsg",
    "CacheFlushedMsg",
    "DecodeMsg",
    "DetokenizeMsg",
    "ExitMsg",
    "FlushBackendMsg",
    "FlushCacheMsg",
    "Histogram",
    "PromptLogprobsMsg",
    "ReplyKind",
    "SchedulerStats",
    "StatsMsg",
    "StatsReply",
    "TokenScore",
    "TokenizeMsg",
    "TokenizedMsg",
    "UserMsg",
    "UserReply",
]
