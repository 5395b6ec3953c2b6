"""Writes docs/flags.md from the parsers of the command line: `python tools/write_flags.py`. A test compares the page with the code.

Knows argparse and Markdown, not what a flag means. Called by hand and by tests/test_docs.py.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from minisgl.cli import build_parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
TOP = """\
# Flags

Every flag of every command, as `--help` tells it. This page is written by `tools/write_flags.py` from the command line's own parsers;
change the help there, not here.

`python -m minisgl` is the same command line as `minisgl`; where it is given no command, it is `minisgl serve`, so that
`python -m minisgl --model MODEL --port 1919` works. A flag cannot be abbreviated. One that stands twice has its last value.
`minisgl serve` also reads its flags from a file: see [operations](operations.md#settings-in-a-file).
"""
HEAD = "| flag | value | default | what it does |\n|---|---|---|---|"
DEFAULT = re.compile(r" \(default: ([^()]*)\)$")
KINDS = {int: "integer", float: "number"}


def page(parser: argparse.ArgumentParser) -> str:
    """The whole page, in Markdown."""
    return "\n".join([TOP, *_sections(parser, {})])


def _sections(parser: argparse.ArgumentParser, seen: dict[str, str]) -> Iterator[str]:
    """A heading and its tables for `parser`, then for the commands below it. `seen`: table -> the heading that it stood under first."""
    yield f"## {parser.prog}\n\n{parser.description}\n"
    children: dict[str, argparse.ArgumentParser] = {}
    tables: dict[str, list[str]] = {}
    for group in parser._action_groups:  # argparse has no public way to list these and the ones below
        title = group.title or ""
        rows = tables.setdefault("" if title in ("positional arguments", "options") else title.capitalize(), [])
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                children = action.choices
                rows += [_row(f"`{each.dest}`", "", "", each.help or "") for each in action._choices_actions]
            elif not isinstance(action, argparse._HelpAction):
                rows.append(_argument(action))
    for title, rows in ((title, rows) for title, rows in tables.items() if rows):
        table = "\n".join([HEAD, *rows])
        first = seen.setdefault(table, parser.prog)
        if first != parser.prog:
            yield f"{title}: the same as of [{first}](#{first.replace(' ', '-')}).\n"
        else:
            yield f"{title}:\n\n{table}\n" if title else f"{table}\n"
    for child in children.values():
        yield from _sections(child, seen)


def _argument(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    text = (action.help or "").removesuffix(" (default: %(default)s)")  # which Python before 3.13 adds to --x/--no-x
    told = DEFAULT.search(text)
    return _row(names, _value(action), told[1] if told else _default(action), DEFAULT.sub("", text))


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if action.type in KINDS:
        return KINDS[action.type]
    return action.metavar if isinstance(action.metavar, str) and action.option_strings else "text"


def _default(action: argparse.Action) -> str:
    if action.default in (None, "", argparse.SUPPRESS):
        return ""
    if action.default is False:
        return "off"
    return f"{action.default:g}" if isinstance(action.default, float) else str(action.default)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(build_parser()), encoding="utf-8")
