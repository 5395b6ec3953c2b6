"""The command line as a user types it: what it prints, where, and with which exit status."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from minisgl.cli import main
from minisgl.core import SamplingParams
from minisgl.llm import LLM

SMALL = {"num_pages": 64, "max_seq_len": 256}
SMALL_FLAGS = ["--num-pages", "64", "--max-seq-len", "256"]


@pytest.mark.parametrize("is_piped", [False, True])
def test_generate_prints_the_answer_and_then_the_speed(tiny_models, capsys, monkeypatch, is_piped):
    model, question = str(tiny_models("llama")), "Tell me about the sea."
    with LLM(model, **SMALL) as llm:
        wanted = llm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=8))
    monkeypatch.setattr("sys.stdin", io.StringIO(question))
    assert main(["generate", "-" if is_piped else question, "--model", model, "--max-tokens", "8", *SMALL_FLAGS]) == 0
    printed = capsys.readouterr()
    assert printed.out == wanted.text + "\n"
    num_tokens = len(wanted.token_ids)
    assert re.fullmatch(rf"\[{num_tokens} tokens in [0-9.]+ s, [0-9.]+ tokens/s\]\n", printed.err)


def test_generate_tells_why_a_question_cannot_be_answered(tiny_models, capsys):
    assert main(["generate", "word " * 1000, "--model", str(tiny_models("llama")), *SMALL_FLAGS]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "256" in printed.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate", " "], "PROMPT"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens: 0 found"),
        (["generate", "hi", "--page-size", "-1"], "--page-size"),
        (["generate", "hi", "--model", "/no/such/model"], "/no/such/model"),
        (["serve", "--tp", "2"], "--tp: 2 found"),
    ],
)
def test_a_wrong_request_is_one_line_on_stderr_and_status_2(capsys, words, told):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert told in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("words", [["/no/such/model"], ["--model", "/no/such/model", "--port", "0"], ["serve", "/no/such/model"]])
def test_without_a_command_the_module_serves(words):
    done = subprocess.run([sys.executable, "-m", "minisgl", *words], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: model: '/no/such/model'")


def test_a_flag_is_not_guessed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--por", "1"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --por" in capsys.readouterr().err
