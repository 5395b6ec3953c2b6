"""Texts to ids, without stopping the process's other threads. Knows the library only. Called by `loader` and `control_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

__all__ = ["encode_freely"]

MOST_CHARS = 4_000_000
"""of the texts that are tokenized together: the library holds about 25 bytes for each character of them"""


def encode_freely(backend: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """The same ids as `backend.encode` of each, which would hold Python's lock throughout: half a minute for a huge text.

    Several texts are spread over the machine's cores, unless TOKENIZERS_PARALLELISM=false.
    """
    size = max(1, MOST_CHARS // (max(map(len, texts), default=0) + 1))
    batches = (texts[start : start + size] for start in range(0, len(texts), size))
    return [encoding.ids for batch in batches for encoding in backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)]
