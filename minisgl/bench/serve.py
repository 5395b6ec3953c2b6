"""`minisgl bench serve`: load on an OpenAI-compatible server over HTTP, and what came back how fast.

Prepares, draws the plan, lets client processes carry it out, reports. Knows nothing of minisgl's own server: any server will do. Called
by the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.machine import hardware, num_usable_cpus, versions
from minisgl.bench.serve_http import Target, parse_url
from minisgl.bench.serve_outcome import Outcome
from minisgl.bench.serve_plan import PATHS, Endpoint, Lane, Options, Plan, make_lanes, parse_range
from minisgl.bench.serve_prepare import Prepared, prepare
from minisgl.bench.serve_processes import run_plans
from minisgl.bench.serve_report import error_lines, run_lines, summarize, summarize_errors
from minisgl.errors import ConfigError

__all__ = ["Setup", "add_arguments", "main", "run"]

DEFAULT_URL = "http://127.0.0.1:1919"
MOST_PROCESSES = 8
INTERRUPTED = 130


@dataclass(frozen=True)
class Setup:
    """Where the load goes and how it is made."""

    target: Target
    endpoint: Endpoint = "chat"
    model: str | None = None
    """None: the first that the server names"""
    timeout: float = 600.0
    """seconds of one request, with all of its answer"""
    num_processes: int = 0
    """0: as many as half of the cores that may be used, at most 8"""
    repeats: int = 3

    def __post_init__(self) -> None:
        for flag, value, least in (("--processes", self.num_processes, 0), ("--repeats", self.repeats, 1)):
            if value < least:
                raise ConfigError(f"{flag}: {value} found; at least {least} is allowed")
        if not 0 < self.timeout <= 1e6:
            raise ConfigError(f"--timeout: {self.timeout} found; a number of seconds above 0 is allowed")


def run(setup: Setup, options: Options, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Prepare and measure; the report, ready for JSON. Raises WorkerError if a client process dies."""
    # 1. What kind of server is it?
    prepared = asyncio.run(prepare(setup.target, options, setup.endpoint, setup.model, setup.timeout))
    if isinstance(prepared, Outcome):
        return _report_of_failure(prepared, say)
    lanes = make_lanes(options, prepared.scale)
    num_processes = min(setup.num_processes or max(1, min(MOST_PROCESSES, num_usable_cpus() // 2)), len(lanes))
    for line in _headlines(setup, options, prepared):
        say(line)
    # 2. The same numbers of tokens each time, with other words, so that no run finds the one before it in a cache.
    runs: list[dict[str, Any]] = []
    is_interrupted = False
    while len(runs) < setup.repeats and not is_interrupted:
        plans = _plans(setup, options, prepared, lanes, num_processes, len(runs))
        try:
            results, is_interrupted = run_plans(plans)
        except KeyboardInterrupt:  # before the load had begun, or for the second time
            if not runs:
                raise
            is_interrupted = True
            break
        runs.append({"is_interrupted": is_interrupted, **summarize(results, is_rated=options.rate > 0)})
        say(f"\nrun {len(runs)} of {setup.repeats}{', interrupted' if is_interrupted else ''}")
        for line in run_lines(runs[-1]):
            say(line)
    # 3. The median counts; a run that was broken off does not, unless there is no other.
    whole = [one for one in runs if not one["is_interrupted"]] or runs
    median = statistics.median(one["output_tokens_per_s"] for one in whole)
    if len(whole) > 1:
        say(f"\nmedian of {len(whole)}: {median:,.1f} output tokens/s")
    return {
        "model": prepared.form.model,
        "request": {"path": PATHS[setup.endpoint], "limit": prepared.form.limit_name, **prepared.form.extensions},
        "prompt_scale": asdict(prepared.scale),
        "notes": prepared.notes,
        "num_processes": num_processes,
        "output_tokens_per_s": median,
        "is_interrupted": is_interrupted,
        "runs": runs,
    }


def _report_of_failure(outcome: Outcome, say: Callable[[str], None]) -> dict[str, Any]:
    """The server could not even be asked."""
    errors = summarize_errors([outcome])
    for line in ["requests       0 succeeded, 1 failed", *error_lines(errors["errors"]), "no request has succeeded"]:
        say(line)
    return {"output_tokens_per_s": 0.0, "is_interrupted": False, "runs": [{"num_succeeded": 0, **errors}]}


def _plans(setup: Setup, options: Options, prepared: Prepared, lanes: Sequence[Lane], number: int, run_number: int) -> list[Plan]:
    """The lanes dealt out like cards."""
    shared = prepared.scale.num_words_inside(options.shared_prefix_tokens)
    text_seed = f"{options.seed}/{run_number}"
    return [Plan(setup.target, prepared.form, setup.timeout, list(lanes[place::number]), text_seed, shared) for place in range(number)]


def _headlines(setup: Setup, options: Options, prepared: Prepared) -> list[str]:
    options = options.effective
    (least_in, most_in), (least_out, most_out) = options.prompt_tokens, options.answer_tokens
    if options.rate:
        how = f"{options.rate:g} conversations/s at random moments"
    else:
        how = f"{options.streams:,} streams, started over {options.ramp_up:g} s, {options.requests_per_stream:,} conversations each"
    shared = f"{options.shared_prefix_tokens:,} shared tokens, then " if options.shared_prefix_tokens else ""
    turns = f", {options.turns} turns in each" if options.turns > 1 else ""
    scale = prepared.scale
    return [
        f"{setup.target.authority}{setup.target.prefix}{PATHS[setup.endpoint]}, model {prepared.form.model}",
        f"{options.num_requests:,} requests: {how}{turns}; seed {options.seed}",
        f"prompts of {shared}{least_in:,} to {most_in:,} tokens, answers of {least_out:,} to {most_out:,}, "
        f"temperature {options.temperature:g}",
        f"prompts are made of words: {scale.tokens_per_word:.2f} tokens each and {scale.tokens_around:.1f} around them, by {scale.source}",
        *(f"note: {note}" for note in prepared.notes),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this program."""
    default = Options()
    server = parser.add_argument_group("server")
    server.add_argument("--url", default=DEFAULT_URL, help=f"root of the server, or its /v1 (default: {DEFAULT_URL})")
    server.add_argument("--model", metavar="NAME", help="model to ask for; default: the first that the server names")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; not written into the report")
    server.add_argument("--endpoint", choices=list(PATHS), default="chat", help="what is asked for (default: chat)")
    server.add_argument(
        "--timeout", type=float, default=600.0, help="seconds that one request may take, with all of its answer (default: 600)"
    )
    load = parser.add_argument_group("load")
    load.add_argument("--streams", type=int, default=default.streams, help="conversations at the same time (default: 64)")
    text = "conversations of a stream, one after the other; 0: 20 for a lone stream, else 8"
    load.add_argument("--requests-per-stream", type=int, default=default.requests_per_stream, help=text)
    text = "tokens of a prompt, LOW:HIGH, drawn evenly (default: 128:640)"
    load.add_argument("--prompt-tokens", metavar="LOW:HIGH", default="128:640", help=text)
    text = "tokens of an answer, LOW:HIGH, drawn evenly (default: 64:448)"
    load.add_argument("--answer-tokens", metavar="LOW:HIGH", default="64:448", help=text)
    load.add_argument("--ramp-up", metavar="SECONDS", type=float, help="seconds over which the streams are started (default: 5)")
    text = "start conversations at random moments, R per second, whatever is still running; --streams times --requests-per-stream in all"
    load.add_argument("--rate", metavar="R", type=float, default=default.rate, help=text)
    text = "tokens at the start of each conversation, the same in all (default: 0)"
    load.add_argument("--shared-prefix-tokens", metavar="N", type=int, default=default.shared_prefix_tokens, help=text)
    text = "requests of a conversation, each with all that was said before it (default: 1)"
    load.add_argument("--turns", metavar="N", type=int, default=default.turns, help=text)
    load.add_argument("--temperature", type=float, default=default.temperature, help="of the sampling; 0 is greedy (default: 0.6)")
    load.add_argument("--seed", type=int, default=default.seed, help="seed of texts, numbers of tokens and arrivals (default: 0)")
    load.add_argument("--repeats", type=int, default=3, help="runs, of which the median counts (default: 3)")
    text = "client processes; 0: half as many as there are usable cores, at most 8"
    load.add_argument("--processes", metavar="N", type=int, default=0, help=text)
    parser.add_argument("--json", metavar="FILE", help="also write a report with versions, hardware and all figures")


def main(arguments: argparse.Namespace) -> int:
    """The program: parsed arguments -> exit status; 1 if no request has succeeded, 130 after Ctrl-C."""
    names = ("streams", "requests_per_stream", "ramp_up", "rate", "shared_prefix_tokens", "turns", "temperature", "seed")
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    for name, flag in (("prompt_tokens", "--prompt-tokens"), ("answer_tokens", "--answer-tokens")):
        settings[name] = parse_range(flag, getattr(arguments, name))
    options = Options(**settings)
    target = parse_url(arguments.url, arguments.api_key)
    setup = Setup(target, arguments.endpoint, arguments.model, arguments.timeout, arguments.processes, arguments.repeats)
    frame: dict[str, Any] = {}
    if arguments.json is not None:
        if not Path(arguments.json).resolve().parent.is_dir():
            raise ConfigError(f"--json {arguments.json}: its folder does not exist; make it first")
        frame = {"versions": versions(), "hardware": hardware()}  # before the load: looking around takes seconds
    report = run(setup, options, say=_say)
    if arguments.json is not None:
        head = {"benchmark": "serve", "command": _without_key(sys.argv, arguments.api_key), "url": arguments.url}
        report = {**head, "options": asdict(options.effective), "timeout": setup.timeout, **report, **frame}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if report["is_interrupted"]:
        return INTERRUPTED
    return 0 if any(one["num_succeeded"] for one in report["runs"]) else 1


def _say(line: str) -> None:
    print(line, flush=True)


def _without_key(words: Sequence[str], key: str | None) -> list[str]:
    return [word if key is None else word.replace(key, "…") for word in words]
