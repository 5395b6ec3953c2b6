"""Settings from a YAML file, as the words of a command line: names are those of the flags, and argparse checks the values.

Knows an argparse parser, not what its flags mean. Called by the command line.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from minisgl.errors import ConfigError

__all__ = ["read_config_words"]

NOT_IN_FILES = ("config", "help", "version")


def read_config_words(path: str, parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """For each setting of the file at `path`, by its argument's `dest`, the words that give it to `parser`, which raises its errors.

    Raises ConfigError, with the file's name, if it cannot be read, is no mapping, or has a key that is no flag, two keys for one flag, or
    a value that its flag refuses.
    """
    flags = _flags(parser)
    words: dict[str, list[str]] = {}
    for key, value in _read(path).items():
        action = flags.get(str(key))
        if action is None:
            near = difflib.get_close_matches(str(key).replace("_", "-"), flags, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{path}: {key!r} is no setting; {hint}Names are those of the flags, without --")
        if action.dest in words:
            raise ConfigError(f"{path}: {key!r} sets what another name in the file sets too; keep one of them")
        words[action.dest] = _words(path, str(key), action, value)
        try:
            parser.parse_args(words[action.dest])
        except argparse.ArgumentError as error:
            raise ConfigError(f"{path}: {key}: {error.message}") from error
    return words


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What may stand in a file: every spelling of a flag, without its dashes."""
    return {
        spelling.lstrip("-"): action
        for action in parser._actions  # argparse has no public way to list them
        for spelling in action.option_strings
        if action.dest not in NOT_IN_FILES and not spelling.startswith("--no-")
    }


def _read(path: str) -> Mapping[Any, Any]:
    try:
        found = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path}: a {type(found).__name__} found; lines such as `port: 1919` are wanted")
    return found


def _words(path: str, key: str, action: argparse.Action, value: Any) -> list[str]:
    """The flag as it would be typed; nothing for a switch that is off."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key}: {value!r} found; true or false is wanted")
        on = action.option_strings[0]
        off = [spelling for spelling in action.option_strings if spelling.startswith("--no-")]
        return [on] if value else off
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{path}: {key}: {value!r} found; one number or one text is wanted")
    return [f"{action.option_strings[0]}={value}"]
