"""How many streamed tokens a second the processes around the model carry: API, tokenizer, scheduler, with an engine that computes nothing.

    python benchmark/http_chain.py [--streams 64 256] [--tokens 256] [--out benchmark/results/http_chain.json]

The server is `minisgl serve` with the embedded model's tokenizer and a scheduler process whose engine returns pseudo-random tokens at
once. The client is `minisgl bench serve`, on the same cores: one event per token, counted and not parsed. Figures are output tokens per
second between the first and the last event of a run, the median of the runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.core import Batch, Int32Array
from minisgl.engine.base import EngineLimits, StepLogprobs
from minisgl.models.embedded import embedded_model_path

FIRST_ID, NUM_IDS = 1000, 20000
"""Ordinary words of the vocabulary, so that almost each token shows at once."""
REQUESTS_PER_STREAM = 4


class Tokens:
    """A step that is done."""

    def __init__(self, tokens: Int32Array) -> None:
        self._tokens = tokens

    def read(self) -> Int32Array:
        return self._tokens

    def read_logprobs(self) -> StepLogprobs:
        raise NotImplementedError("no request here wants log probabilities")


class InstantEngine:
    """Samples other tokens in every step and computes nothing."""

    def __init__(self) -> None:
        self.limits = EngineLimits(num_pages=40_000, page_size=16, max_seq_len=8192, max_running_req=512, vocab_size=49_152)
        self.cpu_group = None
        self._ids = np.random.default_rng(0).integers(FIRST_ID, FIRST_ID + NUM_IDS, 100_003).astype(np.int32)
        self._next = 0

    def submit(self, batch: Batch) -> Tokens:
        count = len(batch.sample_rows)
        self._next = (self._next + count) % (len(self._ids) - 1024)
        return Tokens(self._ids[self._next : self._next + count])


def scheduler_process() -> int:
    """The child in place of `minisgl.processes.scheduler_process`."""
    from minisgl.processes.child import Child, run_child
    from minisgl.processes.served_scheduler import ServedScheduler, serve_scheduler

    def run(child: Child) -> None:
        serve_scheduler(child, ServedScheduler(child.config, InstantEngine(), child.heart))

    return run_child(run)


def server_process() -> int:
    """The launcher, with our scheduler process."""
    from minisgl.scheduler.config import SchedulerConfig
    from minisgl.server.launcher import CHILD_MODULES, serve
    from minisgl.server.options import ServerOptions

    config = SchedulerConfig(str(embedded_model_path()), backend_create_detokenizer_link=False)
    modules = {**CHILD_MODULES, "scheduler": "benchmark.http_chain"}
    return serve(ServerOptions(config, port=0, drain_timeout=0), say=lambda line: print(line, flush=True), child_modules=modules)


def measure(url: str, streams: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """One setting: the client's own report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        load = ["--streams", streams, "--requests-per-stream", REQUESTS_PER_STREAM, "--prompt-tokens", "8:16", "--ramp-up", 0]
        answers = ["--answer-tokens", f"{num_tokens}:{num_tokens}", "--repeats", repeats, "--processes", 1, "--json", report]
        command = [sys.executable, "-m", "minisgl", "bench", "serve", "--url", url, *load, *answers]
        subprocess.run(list(map(str, command)), check=True)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return {name: value for name, value in found.items() if name not in ("command", "url")}  # of this run's temporary places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="connections at the same time")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each setting")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    server = subprocess.Popen(
        [sys.executable, "-c", "import sys; from benchmark.http_chain import server_process; sys.exit(server_process())"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    try:
        assert server.stdout is not None
        url = next(match[1] for line in server.stdout if (match := re.match(r"ready: (http://\S+)/v1", line)))
        reports = {str(streams): measure(url, streams, args.tokens, args.repeats) for streams in args.streams}
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)
    if args.out:
        from minisgl.bench.machine import hardware

        about = {"command": " ".join(["python", *sys.argv]), "python": platform.python_version(), "uvicorn": version("uvicorn")}
        args.out.write_text(json.dumps({**about, "hardware": hardware(), "streams": reports}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--help"] or not __package__:
        main()
    else:
        sys.exit(scheduler_process())
