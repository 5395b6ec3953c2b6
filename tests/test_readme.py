"""The README is run: its Python, its commands, and its request to the server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
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


def curl() -> tuple[str, dict[str, str], str]:
    """URL, headers and body of the README's request."""
    words = next(words for words in COMMANDS if words[0] == "curl")
    url = next(word for word in words if word.startswith("http://"))
    return url, dict([words[words.index("-H") + 1].split(": ")]), words[words.index("-d") + 1]


def test_the_request_goes_to_the_default_port():
    port = build_parser().parse_args(["serve"]).port
    assert curl()[0] == f"http://127.0.0.1:{port}/v1/chat/completions"


def test_the_server_answers_the_request(embedded_model):
    serve = next(words for words in COMMANDS if words[:2] == [".venv/bin/minisgl", "serve"])
    command = [sys.executable, "-m", "minisgl", *serve[1:], "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            port = ready_port(server.stdout)
            url, headers, body = curl()
            answer = ask(re.sub(r":\d+/", f":{port}/", url), headers, body)
        finally:
            server.terminate()
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "Paris" in "".join(choice["delta"].get("content", "") for event in events[:-1] for choice in json.loads(event)["choices"])


def ready_port(output: Iterable[str]) -> str:
    """The port that a starting server names when it is ready."""
    lines: list[str] = []
    for line in output:
        lines.append(line)
        if found := re.search(r"ready: http://127\.0\.0\.1:(\d+)", line):
            return found[1]
    raise AssertionError("the server has ended: " + "".join(lines))


def ask(url: str, headers: dict[str, str], body: str) -> str:
    """The answer's text, once the server takes requests."""
    deadline = time.monotonic() + 20
    while (response := httpx.post(url, headers=headers, content=body, timeout=60)).status_code == 503 and time.monotonic() < deadline:
        pass
    assert response.status_code == 200, response.text
    return response.text
