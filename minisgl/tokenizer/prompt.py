"""Prompts in any of their three forms -> token ids, checked. The checks serve the tokenizer processes too, the rest the offline class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union

from minisgl.core import SamplingParams
from minisgl.errors import RequestError
from minisgl.tokenizer.loader import Tokenizer, check_unicode

__all__ = ["Chat", "Prompt", "check_sampling_ids", "check_token_ids", "encode_prompts"]

Chat = Sequence[Mapping[str, Any]]
Prompt = Union[str, Sequence[int], Chat]
"""A text, token ids, or the messages of a chat."""
PIECE = 50_000
"""Ids that are looked at in one call: no other thread runs meanwhile."""


def encode_prompts(
    prompts: Sequence[Any], tokenizer: Tokenizer | None, variables: Mapping[str, Any] | None = None
) -> list[list[int] | RequestError]:
    """For each prompt its token ids, which `check_token_ids` has not seen yet; or what is wrong with it.

    With `variables`, which are the chat template's further ones, each is a chat, whatever it looks like. All texts are tokenized together.
    """
    outcomes: list[Any] = []
    for prompt in prompts:
        try:
            outcomes.append(_read(prompt, tokenizer, variables))
        except RequestError as error:
            outcomes.append(error)
    for adds in (True, False):
        places = [place for place, found in enumerate(outcomes) if isinstance(found, tuple) and found[1] == adds]
        encoded = _known(tokenizer).encode_batch([outcomes[place][0] for place in places], adds) if places else []
        for place, ids in zip(places, encoded, strict=True):
            outcomes[place] = ids
    return outcomes


def _read(prompt: Any, tokenizer: Tokenizer | None, variables: Mapping[str, Any] | None) -> tuple[str, bool] | list[Any]:
    """A text and whether special tokens are added to it; or ids that are still to be checked."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        found = type(prompt).__name__
        raise RequestError(f"the prompt is of type {found}; a text, a list of token ids or a list of messages is wanted", param="prompt")
    if variables is not None:
        if isinstance(prompt, str) or not all(isinstance(message, Mapping) for message in prompt):
            raise RequestError("messages: a list of messages with `role` and `content` is wanted", param="messages")
        if tokenizer is None:
            raise RequestError("messages: the model's directory holds no tokenizer.json; give token ids to generate", param="messages")
    if isinstance(prompt, str):
        _known(tokenizer)
        check_unicode(prompt, "prompt")
        return prompt, True
    if variables is not None or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
        return _known(tokenizer).render_chat(prompt, **(variables or {})), False  # the template writes them itself
    return list(prompt)


def check_token_ids(ids: Sequence[Any], vocab_size: int, param: str = "prompt") -> None:
    """Raise RequestError, about the field `param`, unless there is at least one id and all are ints from 0 to `vocab_size` - 1."""
    if not ids:
        raise RequestError(f"the {param} is empty; at least one token is wanted", code=f"empty_{param}", param=param)
    pieces = (ids[start : start + PIECE] for start in range(0, len(ids), PIECE))
    if all(set(map(type, piece)) == {int} and min(piece) >= 0 and max(piece) < vocab_size for piece in pieces):
        return
    for token_id in ids:  # one is wrong, or an integer of another type
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
