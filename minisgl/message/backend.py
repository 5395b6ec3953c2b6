"""Messages to the schedulers: what rank 0 receives and republishes byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Union

import msgspec

from minisgl.core import SamplingParams
from minisgl.message.codec import TokenIds, make_codec


class BaseBackendMsg(msgspec.Struct, tag=True):
    """Base of all messages to a scheduler."""

    encoder: ClassVar[Callable[[BaseBackendMsg], bytes]]
    decoder: ClassVar[Callable[[bytes], BaseBackendMsg]]


class UserMsg(BaseBackendMsg):
    """A request to run. `input_ids`: int32 [n], torch or numpy when sent, a torch tensor when decoded."""

    uid: int
    input_ids: TokenIds
    sampling_params: SamplingParams
    cache_salt: str | None = None
    """Prompts share cached prefixes only with prompts of the same salt: keeps tenants apart."""

    def __post_init__(self) -> None:
        if not isinstance(self.input_ids, TokenIds):
            raise TypeError(f"input_ids: {type(self.input_ids).__name__} found; an int32 torch tensor or numpy array is wanted")


class AbortBackendMsg(BaseBackendMsg):
    """Stop computing for `uid` and release what it holds. No reply; an unknown uid is not an error."""

    uid: int


class FlushBackendMsg(BaseBackendMsg):
    """Empty the prefix cache if no request runs; answered by `CacheFlushedMsg(uid)`."""

    uid: int


class ExitMsg(BaseBackendMsg):
    """Leave the main loop once what is in flight has been handled."""


class BatchBackendMsg(BaseBackendMsg):
    """Several messages in one frame, handled in order."""

    data: list[Union[UserMsg, AbortBackendMsg, FlushBackendMsg, ExitMsg]]


_encode, _decode = make_codec(Union[UserMsg, AbortBackendMsg, FlushBackendMsg, ExitMsg, BatchBackendMsg])
BaseBackendMsg.encoder = staticmethod(_encode)
BaseBackendMsg.decoder = staticmethod(_decode)
