"""One text to ids, without stopping the process's other threads. Knows the library only. Called by `loader` and `control_tokens`."""

from __future__ import annotations

import tokenizers

__all__ = ["encode_freely"]


def encode_freely(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The same ids as `backend.encode`, which would hold Python's lock throughout: half a minute for a huge text."""
    encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    return list(encoding.ids)
