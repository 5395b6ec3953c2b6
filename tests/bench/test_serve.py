"""`minisgl bench serve` against our own server with an engine that checks its pages, and its report."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest

from minisgl.bench.serve import Setup, run
from minisgl.bench.serve_client import Result
from minisgl.bench.serve_http import parse_url
from minisgl.bench.serve_outcome import Outcome
from minisgl.bench.serve_plan import Options
from minisgl.bench.serve_report import run_lines, summarize
from minisgl.cli import main
from tests.server.server_process import server_process, write_byte_model

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
SMALL = {"streams": 4, "requests_per_stream": 2, "prompt_tokens": (20, 40), "answer_tokens": (5, 20)}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with server_process(write_byte_model(tmp_path_factory.mktemp("model")), scheduler="tests.server.fake_engine_process") as server:
        server.wait_until_ready()
        yield server.url


def measure(url: str, endpoint: str = "chat", processes: int = 2, **options) -> dict:
    setup = Setup(parse_url(url), endpoint, timeout=60.0, num_processes=processes, repeats=1)
    return run(setup, Options(**{**SMALL, **options}), say=lambda line: None)


@needs_proc
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_token_of_a_load_is_counted(url, endpoint):
    report = measure(url, endpoint, ramp_up=0.1)
    one = report["runs"][0]
    assert (one["num_succeeded"], one["num_failed"], one["finish_reasons"]) == (8, 0, {"length": 8})
    assert 8 * 5 <= one["output_tokens"] <= 8 * 20
    assert 0 < one["num_events"] <= one["output_tokens"]  # bytes that are no text come together
    assert 8 * 10 <= one["prompt_tokens"] <= 8 * 60  # words of a byte model differ in length
    assert (report["prompt_scale"]["source"], report["notes"]) == ("/tokenize", [])
    assert 3 < report["prompt_scale"]["tokens_per_word"] < 7
    assert one["client"]["num_processes"] == 2
    assert all(one[name]["p50"] <= one[name]["p99.9"] <= one[name]["max"] for name in ("ttft_ms", "gap_ms", "latency_ms"))


@needs_proc
def test_shared_prefixes_and_turns_are_found_in_the_servers_cache(url):
    plain = measure(url, seed=1, ramp_up=0.0)["runs"][0]
    shared = measure(url, seed=2, ramp_up=0.0, shared_prefix_tokens=60)["runs"][0]
    talked = measure(url, seed=3, ramp_up=0.0, streams=1, turns=2)["runs"][0]
    assert shared["prompt_tokens"] > plain["prompt_tokens"] + 7 * 40
    assert shared["cached_tokens"] > plain["cached_tokens"] + 3 * 40  # the first of each stream may come too early
    assert (talked["num_succeeded"], talked["cached_tokens"] > 2 * 15) == (4, True)


@needs_proc
def test_requests_at_a_rate_all_come(url):
    one = measure(url, rate=200.0)["runs"][0]
    assert (one["num_succeeded"], one["num_failed"], one["all_streams"]) == (8, 0, None)


@needs_proc
def test_the_report_says_what_was_measured_where_and_how(url, tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.json"
    words = ["bench", "serve", "--url", f"{url}/v1", "--streams", "3", "--requests-per-stream", "2", "--prompt-tokens", "20:30"]
    words += ["--answer-tokens", "6", "--ramp-up", "0", "--repeats", "2", "--json", str(path), "--api-key", "hush", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", ["minisgl", *words])
    assert main(words) == 0
    text = path.read_text(encoding="utf-8")
    report = json.loads(text)
    assert "hush" not in text
    assert (report["benchmark"], report["command"][1:3], report["url"]) == ("serve", ["bench", "serve"], f"{url}/v1")
    expected = {"streams": 3, "requests_per_stream": 2, "prompt_tokens": [20, 30], "answer_tokens": [6, 6], "ramp_up": 0, "seed": 0}
    assert {name: report["options"][name] for name in expected} == expected
    assert {"python", "minisgl"} <= report["versions"].keys()
    assert {"cpu", "num_cpus", "gpus"} <= report["hardware"].keys()
    assert [one["output_tokens"] for one in report["runs"]] == [36, 36]
    speeds = [one["output_tokens_per_s"] for one in report["runs"]]
    assert report["output_tokens_per_s"] == pytest.approx(sum(speeds) / 2)
    shown = capsys.readouterr().out
    assert "6 requests: 3 streams, started over 0 s, 2 conversations each; seed 0" in shown
    assert "6 succeeded, 0 failed" in shown
    assert shown.splitlines()[-1].startswith("median of 2: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--url", "localhost"], "--url localhost"),
        (["--prompt-tokens", "5:2"], "--prompt-tokens: 5:2 found"),
        (["--answer-tokens", "few"], "--answer-tokens: 'few' found"),
        (["--rate", "1", "--ramp-up", "1"], "--ramp-up and --rate"),
        (["--timeout", "0"], "--timeout: 0.0 found"),
        (["--processes", "-1"], "--processes: -1 found"),
        (["--repeats", "0"], "--repeats: 0 found"),
        (["--api-key", "a\nb"], "--api-key"),
        (["--json", "/no/such/folder/x"], "--json /no/such/folder/x"),
    ],
)
def test_a_wrong_flag_is_told_before_anything_is_sent(capsys, words, told):
    assert main(["bench", "serve", *words]) == 2
    assert told in capsys.readouterr().err


def outcome(lane: int, start: float, times: list[float], tokens: int | None = None, **fields) -> Outcome:
    end = times[-1] + 0.1 if times else 0.1
    return Outcome(lane, start, end, np.array(times, np.float32).tobytes(), output_tokens=tokens, prompt_tokens=10, **fields)


def result(outcomes: list[Outcome], **fields) -> Result:
    settings = {"num_interrupted": 0, "num_not_sent": 0, "seconds": 4.0, "cpu_seconds": 1.0, "lateness": b"", **fields}
    return Result(outcomes, **settings)


def test_the_figures_are_those_of_the_outcomes():
    good = [
        outcome(0, 0.0, [0.5, 0.6, 0.7, 0.9], tokens=4, cached_tokens=3, finish_reason="length"),
        outcome(1, 1.0, [0.2, 0.3], tokens=4, finish_reason="stop"),
        outcome(0, 1.0, [0.4, 1.4], finish_reason="length"),
    ]
    bad = [outcome(1, 1.4, [0.1], problem="HTTP 429", detail="later"), outcome(1, 1.6, [], problem="HTTP 429", detail="still later")]
    one = summarize([result(good[:1] + bad), result(good[1:], num_interrupted=2, num_not_sent=1, cpu_seconds=3.6)], is_rated=False)
    assert (one["num_succeeded"], one["num_failed"], one["num_interrupted"], one["num_not_sent"]) == (3, 2, 2, 1)
    assert one["errors"] == {"HTTP 429": {"count": 2, "first": "later"}}
    assert (one["output_tokens"], one["prompt_tokens"], one["cached_tokens"], one["num_events"]) == (10, 30, 3, 8)
    assert (one["seconds"], one["num_without_usage"]) == (2.5, 1)
    assert (one["output_tokens_per_s"], one["total_tokens_per_s"], one["requests_per_s"]) == (4.0, 16.0, 1.2)
    assert (one["ttft_ms"]["p50"], one["ttft_ms"]["max"]) == (400.0, 500.0)
    assert (one["gap_ms"]["p50"], one["gap_ms"]["max"]) == (100.0, 1000.0)
    assert (one["latency_ms"]["p50"], one["latency_ms"]["max"]) == (1000.0, 1500.0)
    assert one["client"]["busiest_cpu_share"] == 0.9
    lines = "\n".join(run_lines(one))
    assert "HTTP 429: 2, the first: later" in lines
    assert "the client may have been the limit" in lines


def test_the_speed_while_all_streams_ran_counts_the_tokens_in_that_time():
    lanes = [outcome(0, 0.0, [0.5, 1.5, 2.5], tokens=6), outcome(1, 1.0, [0.2, 0.3, 0.9, 1.9], tokens=4)]
    one = summarize([result(lanes)], is_rated=False)
    # From 1.0, when the second begins, to 2.6, when the first has ended: two events of two tokens, three of one.
    assert one["all_streams"] == {"seconds": 1.6, "output_tokens_per_s": pytest.approx(7 / 1.6, abs=0.01)}
    apart = [outcome(0, 0.0, [0.5], tokens=1), outcome(1, 1.0, [0.5], tokens=1)]
    assert summarize([result(apart)], is_rated=False)["all_streams"] is None


def test_nothing_at_all_can_be_reported():
    one = summarize([result([], num_interrupted=1)], is_rated=False)
    assert (one["num_succeeded"], one["output_tokens_per_s"], one["gap_ms"]) == (0, 0.0, None)
    assert run_lines(one)[-1] == "no request has succeeded"
