"""The command line as a user types it: what it prints, where, and with which exit status."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace

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
        (["serve", "--tp", "0"], "0 ranks found; at least 1 is allowed, change --tp"),
        (["serve", "--num-tokenizer", "17"], "num_tokenizer: 17 found"),
        (["serve", "--drain-timeout", "-1"], "change --drain-timeout"),
        (["serve", "--step-timeout", "nan"], "change --step-timeout"),
        (["serve", "--served-model-name", ""], "change --served-model-name"),
        (["serve", "--config", "/no/such/file"], "--config /no/such/file: cannot be read"),
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


@pytest.fixture
def served(monkeypatch):
    """What `serve` would be started with, in a list that is filled by the command."""
    started = []
    monkeypatch.setattr("minisgl.server.launcher.serve", lambda options, say: started.append(options) or 0)
    return started


CONFIG = """
model: some/model
port: 4000
tp: 2
cache: naive
max-seq-len: 128
memory-ratio: 0.5
overlap: false
dummy-weight: true
served-model-name: "007"
drain-timeout: 2
"""


def test_a_config_file_sets_what_its_flags_set(tmp_path, served):
    (tmp_path / "server.yaml").write_text(CONFIG)
    typed = ["some/model", "--port", "4000", "--tp", "2", "--cache", "naive", "--max-seq-len", "128", "--memory-ratio", "0.5"]
    typed += ["--no-overlap", "--dummy-weight", "--served-model-name", "007", "--drain-timeout", "2"]
    assert main(["serve", "--config", str(tmp_path / "server.yaml")]) == main(["serve", *typed]) == 0
    by_file, by_flags = (replace(options, scheduler=replace(options.scheduler, _unique_suffix="x")) for options in served)
    assert by_file == by_flags


def test_the_command_line_wins_over_the_config_file(tmp_path, served):
    (tmp_path / "server.yaml").write_text(CONFIG)
    flags = ["--cache-type", "radix", "--overlap", "--tensor-parallel-size", "1"]
    assert main(["serve", "--port", "5000", "--config", str(tmp_path / "server.yaml"), "other/model", *flags]) == 0
    options = served[0]
    found = (options.port, options.scheduler.model_path, options.scheduler.cache_type, options.scheduler.overlap)
    assert (*found, options.scheduler.tp_info.size) == (5000, "other/model", "radix", True, 1)
    assert options.scheduler.max_seq_len == 128


def test_an_empty_config_file_changes_nothing(tmp_path, served):
    (tmp_path / "server.yaml").write_text("# nothing\n")
    assert main(["serve", "--config", str(tmp_path / "server.yaml")]) == 0
    assert served[0].port == 1919


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1", "'prot' is no setting; did you mean 'port'?"),
        ("max_seq_len: 1", "did you mean 'max-seq-len'?"),
        ("no-overlap: true", "did you mean 'overlap'?"),
        ("config: other.yaml", "'config' is no setting"),
        ("zzz: 1", "'zzz' is no setting; Names are those"),
        ("port: abc", "port: invalid int value: 'abc'"),
        ("device: moon", "device: invalid choice: 'moon'"),
        ("tp: 1\ntensor-parallel-size: 2", "'tensor-parallel-size' sets what another name in the file sets too"),
        ("port: [1]", "port: [1] found; one number or one text is wanted"),
        ("port:", "port: None found"),
        ("port: true", "port: True found"),
        ("overlap: 1", "overlap: 1 found; true or false is wanted"),
        ("- port", "a list found"),
        ("port: {", "not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_a_wrong_config_file_is_one_line_on_stderr_and_status_2(tmp_path, capsys, served, text, told):
    (tmp_path / "server.yaml").write_text(text)
    assert main(["serve", "--config", str(tmp_path / "server.yaml")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert told in printed.err
    assert str(tmp_path / "server.yaml") in printed.err
    assert printed.err.count("\n") == 1
    assert served == []
