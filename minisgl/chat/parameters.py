"""Sampling parameters as a user types them: `temperature=0.7 stop="a b"`. Called by the program."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping
from typing import Any

from minisgl.core import SamplingParams
from minisgl.errors import ConfigError

__all__ = ["KINDS", "read_params"]

KINDS: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "min_tokens": int,
    "max_tokens": int,
    "stop": list,
    "ignore_eos": bool,
}
"""Those that can be set. Their names are the fields of an OpenAI request, and of our own extensions of it."""
WANTED = {float: "a number", int: "an integer", bool: "true or false", list: "a text or a JSON list of texts"}


def read_params(text: str, current: Mapping[str, Any]) -> dict[str, Any]:
    """`current` with the settings in `text`; one without a value takes the parameter back. Raises InvalidInputError: then none holds."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from error
    params = dict(current)
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} found; NAME=VALUE is wanted, such as temperature=0.7")
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KINDS)}"
            raise ConfigError(f"{name!r} is no parameter; {hint}")
        params.pop(name, None)
        if value:
            params[name] = _read(name, value)
    SamplingParams(**params)
    return params


def _read(name: str, text: str) -> Any:
    kind = KINDS[name]
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return _read_stop(text) if kind is list else kind(text)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{name}: {text!r} found; {WANTED[kind]} is wanted") from error


def _read_stop(text: str) -> list[Any]:
    r"""Anything that is no JSON list or string is the text itself; JSON is for those with a "\n"."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, list) else [value if isinstance(value, str) else text]
