"""A prompt in any of its three forms -> token ids, checked: what the tokenizer processes and the offline class share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union

from minisgl.core import SamplingParams
from minisgl.errors import RequestError
from minisgl.tokenizer.loader import Tokenizer

__all__ = ["Chat", "Prompt", "check_sampling_ids", "check_token_ids", "prompt_ids"]

Chat = Sequence[Mapping[str, Any]]
Prompt = Union[str, Sequence[int], Chat]
"""A text, token ids, or the messages of a chat."""


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Token ids, at least one, each below `vocab_size`. Raises RequestError naming what is wrong with the prompt."""
    if isinstance(prompt, str):
        ids = _known(tokenizer).encode(prompt)
    elif len(prompt) > 0 and isinstance(prompt[0], Mapping):
        ids = _known(tokenizer).apply_chat_template(prompt)  # type: ignore[arg-type]  # the first element tells
    else:
        ids = list(prompt)  # type: ignore[arg-type]  # checked below
    check_token_ids(ids, vocab_size)
    return ids


def check_token_ids(ids: Sequence[Any], vocab_size: int, param: str = "prompt") -> None:
    """Raise RequestError, about the field `param`, unless there is at least one id and all are ints from 0 to `vocab_size` - 1."""
    if not ids:
        raise RequestError(f"the {param} is empty; at least one token is wanted", code=f"empty_{param}", param=param)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"the {param} holds {token_id!r}; token ids are integers", code="invalid_token_id", param=param)
        if not 0 <= token_id < vocab_size:
            text = f"the {param} holds token id {token_id}; 0 to {vocab_size - 1} is allowed"
            raise RequestError(text, code="invalid_token_id", param=param)


def check_sampling_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError for a token id in `params` that the model does not have: it could have no effect."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if token_id >= vocab_size:
                raise RequestError(f"{name}: token id {token_id} found; 0 to {vocab_size - 1} is allowed", param=name)


def _known(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise RequestError("the model's directory holds no tokenizer.json: give the prompt as a list of token ids", param="prompt")
    return tokenizer
