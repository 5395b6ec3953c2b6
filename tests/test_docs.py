"""What docs/ says about the code is true: files and functions on the way of a request exist, links lead somewhere, flags, fields of
requests and error messages are those of the source."""

from __future__ import annotations

import argparse
import ast
import re
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest

from minisgl.cli import build_parser
from minisgl.errors import RequestError
from minisgl.server import protocol
from minisgl.server.openapi import ROUTES
from tests.tools.cli_flags import parsers
from tests.tools.markdown import table_rows
from tools.write_flags import PAGE, page

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOPS = table_rows(ARCHITECTURE, "hop")
PAGES = sorted(path.relative_to(ROOT).as_posix() for folder in (".", "docs", "docs/decisions") for path in (ROOT / folder).glob("*.md"))


def definitions(path: Path) -> set[str]:
    """Qualified names of the classes, methods and functions of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
            names.update(
                f"{node.name}.{child.name}"
                for child in getattr(node, "body", [])
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            )
    return names


def test_there_are_twelve_hops():
    assert [row[0] for row in HOPS] == [str(number) for number in range(1, 13)]


@pytest.mark.parametrize("row", HOPS, ids=lambda row: f"hop-{row[0]}")
def test_hop_names_file_and_function(row):
    names = re.findall(r"`([^`]+)`", row[2])
    files = [name for name in names if "/" in name]
    functions = [name for name in names if "/" not in name]
    missing = [file for file in files if not (ROOT / "minisgl" / file).is_file()]
    assert files, row[2]
    assert missing == []
    assert functions, row[2]
    found = set().union(*(definitions(ROOT / "minisgl" / file) for file in files))
    assert [function for function in functions if function not in found] == []


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    path = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_links_to_a_heading_find_it(name):
    path = ROOT / name
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", path.read_text(encoding="utf-8")):
        headings = re.findall(r"^#+ (.*)$", (path.parent / file if file else path).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_decisions_are_numbered_without_gaps():
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


# ---- flags.md ---------------------------------------------------------------------------------------------------------------------


def test_the_page_of_flags_is_what_the_parsers_say():
    assert PAGE.read_text(encoding="utf-8") == page(build_parser()), "run: .venv/bin/python tools/write_flags.py"


def test_every_flag_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    spellings = [spelling for parser in parsers(build_parser()) for action in parser._actions for spelling in action.option_strings]
    assert len(spellings) > 100
    assert {spelling for spelling in spellings if f"`{spelling}`" not in text} <= {"-h", "--help"}


def test_a_parser_becomes_a_heading_and_a_table():
    parser = argparse.ArgumentParser("tool", description="Does it.")
    parser.add_argument("file", metavar="IN|OUT", help="what to read")
    parser.add_argument("--size", "-s", type=int, default=3, help="bytes (default: 3)")
    parser.add_argument("--kind", choices=["a", "b"], help="which; default: the best")
    parser.add_argument("--quick", action="store_true", help="hurry")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="look twice (default: on)")
    table = page(parser).partition("## tool\n\nDoes it.\n\n")[2].splitlines()
    assert table == [
        "| flag | value | default | what it does |",
        "|---|---|---|---|",
        "| `IN\\|OUT` | text |  | what to read |",
        "| `--size`, `-s` | integer | 3 | bytes |",
        "| `--kind` | `a`, `b` |  | which; default: the best |",
        "| `--quick` |  | off | hurry |",
        "| `--check`, `--no-check` |  | on | look twice |",
    ]


# ---- api.md -----------------------------------------------------------------------------------------------------------------------

API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
FIELDS = table_rows(API, "field")
MESSAGE_FIELDS = table_rows(API.partition("## Messages")[2], "field")
OTHER_ROUTES = table_rows(API.partition("## Other routes")[2], "route")
ACCEPTED = ("yes", "limited", "no effect")
OPENAI_ROUTES = (
    (1, protocol.ChatRequest, {"messages": [{"role": "user", "content": "x"}], "seed": 1}),
    (2, protocol.CompletionRequest, {"prompt": "x", "seed": 1}),
)
HARMLESS = {"metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True}


def quoted(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def documented(rows: list[list[str]], column: int, *words: str) -> set[str]:
    """The fields for which that column says one of the words."""
    return set().union(*(quoted(row[0]) for row in rows if row[column] in words))


def decode(kind, body):
    return protocol.decode_body(msgspec.json.encode(body), kind)


def test_the_table_of_fields_uses_its_own_words_and_names_each_field_once():
    words = {row[0] for row in table_rows(API, "word")}
    assert words == {*ACCEPTED, "refused", "–"}
    assert {cell for row in FIELDS for cell in row[1:4]} == words | {"beside"}
    names = [name for row in FIELDS for name in quoted(row[0])]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(("column", "kind", "body"), OPENAI_ROUTES)
def test_the_fields_of_an_openai_route_are_those_that_are_decoded(column, kind, body):
    assert documented(FIELDS, column, *ACCEPTED) == set(kind.__struct_fields__)
    assert documented(FIELDS, column, "limited") == set(kind.NEUTRAL)


@pytest.mark.parametrize(("column", "kind", "body"), OPENAI_ROUTES)
def test_the_values_of_a_limited_field_are_those_that_its_notes_name(column, kind, body):
    rows = [row for row in FIELDS if row[column] == "limited"]
    named = {name: [msgspec.json.decode(value) for value in re.findall(r"`([^`]+)`", row[4])] for row in rows for name in quoted(row[0])}
    assert named == {name: list(values) for name, values in kind.NEUTRAL.items()}


@pytest.mark.parametrize(("column", "kind", "body"), OPENAI_ROUTES)
def test_a_field_without_effect_changes_nothing_in_what_the_tokenizer_hears(column, kind, body):
    def jobs(more):
        request = decode(kind, body | more)
        return [request.job({})] if kind is protocol.ChatRequest else request.jobs({})

    names = documented(FIELDS, column, "no effect")
    assert names >= {"user", "metadata", "store"}
    assert [name for name in sorted(names) if jobs({name: HARMLESS.get(name, "x")}) != jobs({})] == []
    assert jobs({"temperature": 0.5}) != jobs({})


@pytest.mark.parametrize("name", sorted(documented(FIELDS, 1, "refused")))
def test_a_refused_field_is_a_400_that_names_it(name):
    kind, body = OPENAI_ROUTES[0][1:]
    with pytest.raises(RequestError) as error:
        decode(kind, body | {name: None})
    assert (error.value.status, error.value.param) == (400, name)


def test_the_fields_of_generate_are_those_that_are_decoded():
    assert documented(FIELDS, 3, *ACCEPTED) == set(protocol.GenerateParams.__struct_fields__)
    assert documented(FIELDS, 3, "beside") | {"sampling_params"} == set(protocol.GenerateRequest.__struct_fields__)


def test_the_fields_of_a_message_are_those_that_are_decoded():
    kinds = {field.name: field.type for field in msgspec.structs.fields(protocol.ChatMessage)}
    assert documented(MESSAGE_FIELDS, 1, "yes", "limited") == set(kinds)
    assert documented(MESSAGE_FIELDS, 1, "limited") == {name for name, kind in kinds.items() if kind is type(None)}


def test_the_fields_of_other_routes_are_those_that_are_decoded():
    found: dict[str, set[str]] = {}
    for routes, fields, _ in OTHER_ROUTES:
        for route in quoted(routes):
            found[route] = found.get(route, set()) | quoted(fields)
    bodies = {path: set(body.__struct_fields__) for _, path, body, *_ in ROUTES if body is not None}
    assert found == {route: bodies[route] for route in ("/tokenize", "/detokenize", "/abort")}


def test_the_table_of_routes_names_all_that_there_are():
    found = {tuple(name.split()) for row in table_rows(API, "route") for name in quoted(row[0])}
    assert found == {(method.upper(), path.replace("{model}", "{id}")) for method, path, *_ in ROUTES}


def test_routes_that_are_said_to_be_missing_are():
    missing = quoted(API.partition("Routes of OpenAI's API that are not there")[2].partition("## ")[0])
    assert len(missing) > 5
    assert missing.isdisjoint({path for _, path, *_ in ROUTES})


# ---- troubleshooting.md -----------------------------------------------------------------------------------------------------------

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `([^`]+)`", TROUBLES, re.MULTILINE)


@pytest.fixture(scope="module")
def literals() -> set[str]:
    """Every text in the package's source, with `…` in place of what is filled in later."""
    found = set()
    for path in (ROOT / "minisgl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[sd]", "…", node.value))
    return found


def test_messages_stand_in_the_tables_once():
    rows = re.findall(r"^\| (?!message)", TROUBLES, re.MULTILINE)
    assert len(rows) == len(MESSAGES) == len(set(MESSAGES)) > 50


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_source(message, literals):
    assert any(message in text for text in literals), "docs/troubleshooting.md quotes a message that is said no longer"


def test_codes_of_errors_are_in_the_source(literals):
    codes = re.findall(r"^\| `[^`]+` \| \d{3} `(\w+)`", TROUBLES, re.MULTILINE)
    assert len(codes) > 15
    router = {status.phrase.lower().replace(" ", "_") for status in HTTPStatus}
    assert [code for code in codes if code not in literals | router | {"empty_prompt"}] == []
