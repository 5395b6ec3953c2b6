"""What docs/ says about the code is true: files and functions on the way of a request exist, links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tools.markdown import table_rows

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


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_decisions_are_numbered_without_gaps():
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
