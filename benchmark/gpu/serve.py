"""HTTP speed: the server with random weights under `minisgl bench serve`, and the offline class on the requests of its largest load.

    python benchmark/gpu/serve.py --model DIR [--tokenizer DIR] [--streams 1 64 256] [--repeats 3] [--out FILE] [-- FLAGS of minisgl serve]

The workload is that of docs/benchmarking.md. `--tokenizer` names a directory with tokenizer.json and tokenizer_config.json, for models
that are written without one. The server's cores are shared with the client's processes. With FLAGS there is no offline figure: it would
be of other settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minisgl.bench.serve_http import parse_url
from minisgl.bench.serve_plan import Form, Options, Plan, Scale, make_lanes
from minisgl.core import SamplingParams
from minisgl.llm import LLM

START_S, END_S = 120.0, 30.0


@contextlib.contextmanager
def server(model: Path, flags: list[str]) -> Iterator[tuple[str, float]]:
    """(URL, seconds until it was ready)"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "minisgl", "--model", str(model), "--dummy-weight", "--port", url.rpartition(":")[2], *flags]
    start = time.monotonic()
    process = subprocess.Popen(command)
    try:
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() - start > START_S:
                raise SystemExit(f"the server was not ready within {START_S:g} s, or has ended: {process.poll()}")
            time.sleep(0.05)
        yield url, time.monotonic() - start
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def load(url: str, num_streams: int, args: argparse.Namespace, file: Path) -> dict[str, Any]:
    """One `minisgl bench serve`; its report."""
    flags = ["--url", url, "--streams", str(num_streams), "--repeats", str(args.repeats), "--json", str(file)]
    flags += ["--prompt-tokens", args.prompt_tokens, "--answer-tokens", args.answer_tokens]
    flags += ["--requests-per-stream", str(args.requests_per_stream)]
    subprocess.run([sys.executable, "-m", "minisgl", "bench", "serve", *flags], check=True)
    report: dict[str, Any] = json.loads(file.read_text())
    return {name: value for name, value in report.items() if name not in ("command", "url")}


def offline(model: Path, report: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Output tokens per second of `LLM.generate` on the texts and limits of a load, all given at once."""
    given = report["options"]
    ranges = {name: tuple(given[name]) for name in ("prompt_tokens", "answer_tokens")}
    options = Options(streams=given["streams"], requests_per_stream=given["requests_per_stream"], seed=given["seed"], **ranges)
    lanes = make_lanes(options, Scale(**report["prompt_scale"]))
    turns = [conversation for lane in lanes for conversation in lane.conversations]
    params = [SamplingParams(temperature=given["temperature"], max_tokens=one.turns[0].max_tokens, ignore_eos=True) for one in turns]
    rates = []
    with LLM(str(model), use_dummy_weight=True) as llm:
        llm.generate(["warm", "up"], SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
        for number in range(repeats):
            plan = Plan(parse_url("http://unused", None), Form("chat", "unused", 0.0), 1.0, lanes, f"{given['seed']}/{number}", 0)
            chats = [plan.form.prompt([plan.text(one, 0)])["messages"] for one in turns]
            llm.reset_prefix_cache()
            start = time.perf_counter()
            results = llm.generate(chats, params, progress=False)
            seconds = time.perf_counter() - start
            assert not [result.error for result in results if result.error]
            rates.append(sum(len(result.token_ids) for result in results) / seconds)
    return {"output_tokens_per_s": statistics.median(rates), "runs": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--tokenizer", type=Path, help="directory with a tokenizer, where the model has none")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256], help="loads")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each load, of which the median counts")
    parser.add_argument("--offline-repeats", type=int, help="runs of the offline class (default: as many)")
    parser.add_argument("--requests-per-stream", type=int, default=0, help="as of minisgl bench serve")
    parser.add_argument("--prompt-tokens", default="128:640", help="as of minisgl bench serve")
    parser.add_argument("--answer-tokens", default="64:448", help="as of minisgl bench serve")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("flags", nargs="*", help="of minisgl serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / args.model.name
        shutil.copytree(args.model, model)
        if args.tokenizer:
            shutil.copytree(args.tokenizer, model, dirs_exist_ok=True)
        with server(model, args.flags) as (url, ready_s):
            print(f"ready after {ready_s:.1f} s", flush=True)
            loads = {str(count): load(url, count, args, Path(folder) / f"{count}.json") for count in args.streams}
        report = {"model": args.model.name, "flags": args.flags, "ready_s": ready_s, "streams": loads}
        if not args.flags:  # the offline class has the defaults
            largest = loads[str(max(args.streams))]
            alone = report["offline"] = offline(model, largest, args.offline_repeats or args.repeats)
            share = report["share_of_offline"] = largest["output_tokens_per_s"] / alone["output_tokens_per_s"]
            print(f"offline, the same requests: {alone['output_tokens_per_s']:,.0f} tok/s; over HTTP {share:.0%} of it")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
