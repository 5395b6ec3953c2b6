"""The README is run: its Python, its commands, and its request to the server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.cli import build_parser
from tests.tools.cli_flags import parsers
from tests.tools.markdown import code_blocks, commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = commands(README)


@pytest.mark.parametrize("code", code_blocks(README, "python"))
def test_python_snippet_runs(code, embedded_model):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_command_exists(words):
    if words[0].startswith("scripts/"):
        assert os.access(ROOT / words[0], os.X_OK)
    elif words[0] == ".venv/bin/minisgl":
        assert f"minisgl {words[1]}" in [parser.prog for parser in parsers(build_parser())]
        build_parser().parse_args(words[1:])
    else:
        assert words[0] == "curl", f"{words[0]}: say here how to check that this command exists"


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_two_commands_are_the_first_things_to_type():
    assert [words[0] for words in COMMANDS[:2]] == ["scripts/demo", "scripts/test"]


def test_the_curl_request_is_json_for_a_route_of_the_default_port():
    curl = next(words for words in COMMANDS if words[0] == "curl")
    body = json.loads(curl[curl.index("-d") + 1])
    assert body["stream"] is True
    url = next(word for word in curl if word.startswith("http://"))
    port = build_parser().parse_args(["serve"]).port
    assert url == f"http://127.0.0.1:{port}/v1/chat/completions"
