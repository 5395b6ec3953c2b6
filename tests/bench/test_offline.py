"""`minisgl bench offline`: the workload of the comparison, and a report that says what was measured."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest

from minisgl.bench.offline import Options, Workload, make_workload, run
from minisgl.cli import main
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError, WorkerError
from minisgl.llm import LLM

TINY = Options(num_requests=3, max_input=20, max_output=6, repeats=2)


def test_the_workload_is_the_one_that_everybody_measures():
    workload = make_workload(Options())
    assert (len(workload.prompts), workload.num_prompt_tokens, workload.num_output_tokens) == (256, 142_827, 133_966)
    assert sum((length - 1) * len(prompt) + length * (length - 1) // 2 for prompt, length in pairs(workload)) == 120_795_204
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    assert workload.prompts == prompts
    assert workload.output_lens == [random.randint(100, 1024) for _ in range(256)]


def pairs(workload: Workload):
    return zip(workload.prompts, workload.output_lens, strict=True)


def test_a_smaller_workload_keeps_its_bounds_and_is_always_the_same():
    options = Options(num_requests=7, max_input=120, max_output=50)
    workload = make_workload(options)
    assert asdict(workload) == asdict(make_workload(options))
    assert len(workload.prompts) == len(workload.output_lens) == 7
    assert all(100 <= len(prompt) <= 120 for prompt in workload.prompts)
    assert set(workload.output_lens) == {50}


@pytest.mark.parametrize("name", ["num_requests", "max_input", "max_output", "repeats"])
def test_nothing_to_measure_is_refused_by_its_flag(name):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: 0 found"):
        Options(**{name: 0})


class Spy(LLM):
    """An engine that notes how it is called."""

    def __init__(self, *arguments, **settings):
        self.calls: list[tuple[int, int, SamplingParams]] = []
        super().__init__(*arguments, **settings)

    def generate(self, prompts, sampling_params=None, *, progress=None):
        first = sampling_params[0]
        self.calls.append((len(prompts), first.max_tokens, first))
        assert all(own.ignore_eos for own in sampling_params)
        return super().generate(prompts, sampling_params, progress=progress)


def test_two_small_calls_come_before_the_clock_and_every_run_is_cold(tiny_models):
    spies = []

    def make():
        spies.append(Spy(tiny_models("llama"), num_pages=16, max_running_req=4))
        return spies[-1]

    report = run(TINY, make, say=lambda line: None)
    assert [(count, tokens) for count, tokens, _ in spies[0].calls] == [(1, 8), (1, 8), (3, 6), (3, 6)]
    assert {params.temperature for _, _, params in spies[0].calls} == {0.6}
    assert [one["num_cached_tokens"] for one in report["runs"]] == [0, 0]
    with pytest.raises(Exception, match="closed"):
        spies[0].generate([[1]], [SamplingParams(ignore_eos=True, max_tokens=1)])


def test_the_report_says_what_was_measured_where_and_how(tiny_models, tmp_path, capsys):
    path = tmp_path / "report.json"
    words = ["bench", "offline", "--model", str(tiny_models("llama")), "--dummy-weight", "--num-requests", "3", "--max-input", "20"]
    words += ["--max-output", "6", "--temperature", "0", "--repeats", "3", "--no-overlap", "--cache-type", "naive", "--page-size", "8"]
    assert main([*words, "--num-pages", "32", "--max-running-requests", "4", "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    workload = {"num_requests": 3, "max_input": 20, "max_output": 6, "temperature": 0.0, "repeats": 3}
    assert report["options"] == {**workload, "profile": 0, "trace": None}
    assert "profile" not in report
    assert (report["num_prompt_tokens"], report["num_output_tokens"]) == (60, 18)
    speeds = sorted(one["output_tokens_per_s"] for one in report["runs"])
    assert (len(speeds), report["output_tokens_per_s"]) == (3, speeds[1])
    assert all(one["seconds"] > 0 for one in report["runs"])
    expected = {"overlap": False, "cache_type": "naive", "page_size": 8, "num_pages": 32, "dtype": "float32", "use_dummy_weight": True}
    assert {name: report["config"][name] for name in expected} == expected
    assert (report["config"]["max_seq_len"], report["config"]["max_extend_tokens"]) == (2048, 256)
    assert {"python", "torch", "minisgl", "numpy"} <= report["versions"].keys()
    assert {"cpu", "num_cpus", "num_threads", "memory_bytes", "gpus"} <= report["hardware"].keys()
    assert report["command"]
    shown = capsys.readouterr().out
    assert "3 requests, 60 prompt tokens, 18 output tokens" in shown
    assert shown.splitlines()[-1].startswith("median of 3: ")


def test_a_workload_that_does_not_fit_is_refused_before_the_clock(tiny_models):
    with pytest.raises(ConfigError, match=r"longest request has 26 tokens.*--max-input"):
        run(TINY, lambda: LLM(tiny_models("llama"), max_seq_len=25, num_pages=8), say=lambda line: None)


def test_an_answer_that_is_short_of_tokens_is_no_figure(tiny_models, monkeypatch):
    monkeypatch.setattr("minisgl.bench.offline.Workload.longest", 0)
    with pytest.raises(WorkerError, match="output tokens instead of 18"):
        run(TINY, lambda: LLM(tiny_models("llama"), max_seq_len=25, num_pages=8), say=lambda line: None)


def test_a_wrong_temperature_is_told_before_a_model_is_loaded(capsys):
    assert main(["bench", "offline", "--model", "/no/such/model", "--temperature", "3"]) == 2
    assert "temperature" in capsys.readouterr().err
