"""The command line is an interface: its flags, aliases, defaults and choices change only together with tests/data/cli_flags.txt."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from minisgl.cli import build_parser
from tests.tools.cli_flags import list_flags, parsers

FROZEN = Path(__file__).parent / "data" / "cli_flags.txt"
HOW_TO_UPDATE = (
    "The command line changed. If that is meant: MINISGL_UPDATE_FROZEN=1 scripts/test tests/test_cli_frozen.py; then a CHANGELOG line."
)


def test_the_flags_are_the_frozen_ones():
    flags = list_flags(build_parser())
    if os.environ.get("MINISGL_UPDATE_FROZEN"):
        FROZEN.write_text("\n".join(flags) + "\n", encoding="utf-8")
    assert flags == FROZEN.read_text(encoding="utf-8").splitlines(), HOW_TO_UPDATE


def test_no_flag_may_be_abbreviated():
    assert [parser.prog for parser in parsers(build_parser()) if parser.allow_abbrev] == []


def test_every_argument_is_explained():
    bare = [f"{p.prog} {a.dest}" for p in parsers(build_parser()) for a in p._actions if not a.help and a.dest != "command"]
    assert bare == []


def test_the_list_shows_what_a_user_can_type():
    parser = argparse.ArgumentParser("tool")
    parser.add_argument("--version", action="version", version="1")
    serve = parser.add_subparsers(dest="command", required=True).add_parser("serve", aliases=["run"])
    serve.add_argument("model", nargs="?")
    serve.add_argument("--cache-type", "--cache", choices=["radix", "naive"], default="radix")
    serve.add_argument("--port", type=int, required=True)
    serve.add_argument("--quiet", action="store_true")
    assert list_flags(parser) == [
        "tool --version: action=version nargs=0 default='==SUPPRESS=='",
        "tool command: action=subparsers choices=['serve', 'run'] required=True default=None",
        "tool serve model: nargs=? default=None",
        "tool serve --cache-type, --cache: choices=['radix', 'naive'] default='radix'",
        "tool serve --port: type=int required=True default=None",
        "tool serve --quiet: action=storetrue nargs=0 default=False",
    ]
