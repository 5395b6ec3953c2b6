"""Reads fenced code and backticked names out of Markdown. Called by the tests that run the documentation."""

from __future__ import annotations

import re
import shlex


def code_blocks(markdown: str, language: str) -> list[str]:
    """The contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)


def commands(markdown: str) -> list[list[str]]:
    """The words of each command in the `bash` blocks; a backslash continues a line."""
    lines = "".join(code_blocks(markdown, "bash")).replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def table_rows(markdown: str, first_header: str) -> list[list[str]]:
    """The cells of each row of the table whose first column is headed `first_header`."""
    table = re.search(rf"^\| *{first_header} *\|.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", markdown, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.group(1).splitlines()] if table else []
