"""Keeps the spelling of a control token in a client's message plain text, while the template's own control tokens stay what they are.

A twin of the tokenizer knows each control token by a secret name only. Spellings in the messages are replaced by characters that occur
nowhere else, the template is rendered, what it wrote itself is renamed, and the client's spellings are put back: to the twin they are
text like any other. Everything else about the twin is the tokenizer's, so that one pass over the whole text gives the same ids.

Messages without such a spelling never come here. Knows no template and no requests. Called by `loader`.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tokenizers

from minisgl.errors import RequestError
from minisgl.tokenizer.encode import encode_freely

__all__ = ["ControlTokens"]

FIRST_STAND_IN = 0x100000
"""Characters for private use, plane 16: they have no meaning of their own."""
FENCE = "\U0010fffd"
WINDOW = 4096
"""Characters that are searched at a time: a search keeps all other threads waiting, and takes long in a text of almost-spellings."""


class ControlTokens:
    """The control tokens of `backend`, by id. The twin is made when it is first needed. Any thread may use it."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        spellings = {token_id: backend.id_to_token(token_id) for token_id in special_ids}
        self._ids = {text: token_id for token_id, text in spellings.items() if text}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._longest = len(longest_first[0]) if longest_first else 0
        self._backend = backend
        self._making = threading.Lock()
        self._twin: tokenizers.Tokenizer | None = None
        self._names: dict[str, str] = {}

    def occur_in(self, value: Any) -> bool:
        """Whether a text anywhere in `value` (texts, lists, mappings) spells a control token."""
        return any(True for text in _texts(value) for _ in self._matches(text))

    def encode(self, value: Any, render: Callable[[Any], str]) -> list[int]:
        """Ids of the text that `render` makes of `value`, in which all texts of `value` stay text.

        Raises RequestError if this tokenizer cannot do it.
        """
        stand_ins = self._stand_ins(value)
        own = render(_map_texts(value, lambda text: self._substitute(stand_ins, text)))
        with self._making:
            if self._twin is None:
                self._twin = self._make_twin()
        text = self._substitute(self._names, own)
        text = text.translate({ord(stand_in): spelling for spelling, stand_in in stand_ins.items()})
        return encode_freely(self._twin, [text], add_special_tokens=False)[0]

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Each spelling in `text`, from left to right, the longest where several begin."""
        start = 0
        while self._pattern is not None and start < len(text):
            end = start + WINDOW
            match = self._pattern.search(text, start, end + self._longest)
            if match is None or match.start() >= end:
                start = end
            else:
                yield match
                start = match.end()

    def _substitute(self, names: Mapping[str, str], text: str) -> str:
        parts, end = [], 0
        for match in self._matches(text):
            parts += [text[end : match.start()], names[match[0]]]
            end = match.end()
        return "".join((*parts, text[end:]))

    def _stand_ins(self, value: Any) -> dict[str, str]:
        """A character for each spelling, none of which is in `value`."""
        used = {char for text in _texts(value) for char in text if ord(char) >= FIRST_STAND_IN}
        free = (chr(code) for code in range(FIRST_STAND_IN, ord(FENCE)) if chr(code) not in used)
        stand_ins = dict(zip(self._ids, free))  # noqa: B905 - there may be more characters than spellings, or fewer
        if len(stand_ins) < len(self._ids):
            raise RequestError("messages: they leave no private-use character free", param="messages")
        return stand_ins

    def _make_twin(self) -> tokenizers.Tokenizer:
        nonce = secrets.token_hex(16)
        self._names = {text: f"{FENCE}{nonce}.{token_id}{FENCE}" for text, token_id in self._ids.items()}
        twin = _renamed(self._backend, self._names)
        if any(twin.token_to_id(self._names[text]) != token_id for text, token_id in self._ids.items()):
            raise RequestError(
                "messages: the spelling of a control token found, which this model's tokenizer cannot keep as text; "
                "allow_control_tokens=true lets it become the token",
                param="messages",
            )
        return twin


def _renamed(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The same tokenizer with some tokens called otherwise, and without what it adds around a text."""
    state = json.loads(backend.to_str())
    model = state["model"]
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    state["post_processor"] = state["decoder"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(inner, change) for inner in value]
    return value
