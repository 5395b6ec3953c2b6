"""Lists an argparse command line, one argument a line, subcommands included. Called by tests/test_cli_frozen.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """`parser` and the parsers of its subcommands, at any depth."""
    yield parser
    for action in parser._actions:  # argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from parsers(child)


def list_flags(parser: argparse.ArgumentParser) -> list[str]:
    """`minisgl serve --port: type=int default=1919`, sorted by command and then in order of declaration."""
    return [f"{each.prog} {line}" for each in sorted(parsers(parser), key=lambda p: p.prog) for line in _arguments(each)]


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        name = ", ".join(action.option_strings) or action.metavar or action.dest
        kind = type(action).__name__.strip("_").removesuffix("Action").lower()
        facts = {
            "action": None if kind == "store" else kind,
            "type": getattr(action.type, "__name__", action.type),
            "nargs": action.nargs if action.option_strings or action.nargs != "A..." else None,
            "choices": list(action.choices) if action.choices is not None else None,
            "required": action.required or None,
        }
        told = " ".join(f"{key}={value}" for key, value in facts.items() if value is not None)
        yield f"{name}: {told} default={action.default!r}".replace(":  ", ": ")
