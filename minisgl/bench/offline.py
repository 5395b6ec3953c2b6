"""`minisgl bench offline`: output tokens per second of the offline class on a fixed workload.

The workload is the one by which small engines are compared: 256 requests, prompts and outputs of 100 to 1,024 tokens, drawn with Python's
own generator from seed 0, prompts first. It knows the offline class only by what it calls; the command line hands it over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from minisgl.bench.machine import hardware, versions
from minisgl.core import SamplingParams
from minisgl.engine.base import EngineLimits
from minisgl.engine.config import DEFAULT_EXTEND_TOKENS
from minisgl.errors import ConfigError, WorkerError
from minisgl.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from minisgl.scheduler.scheduler import Scheduler

__all__ = ["BenchLLM", "Options", "Workload", "add_arguments", "effective_config", "main", "make_workload", "run"]

SEED = 0
LARGEST_ID = 10_000
SHORTEST = 100
"""Tokens; the shortest prompt and the shortest output, unless the longest is shorter still."""
DEFAULT_TRACE = "profile.json"
NUM_WARM_UPS = 2
WARM_UP_TOKENS = 8
NOT_REPORTED = ("tp_info", "offline_mode", "backend_create_detokenizer_link", "_unique_suffix")
"""Settings that are the same in every offline engine, or mean nothing to it."""


class BenchLLM(Protocol):
    """What is measured: `minisgl.llm.LLM`, or something that acts like it."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def is_overlapped(self) -> bool: ...

    @property
    def num_retractions(self) -> int: ...

    @property
    def scheduler(self) -> Scheduler: ...

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[list[int]], sampling_params: list[SamplingParams], /) -> Sequence[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """How much is asked for."""

    num_requests: int = 256
    max_input: int = 1024
    """tokens of the longest prompt"""
    max_output: int = 1024
    """tokens of the longest output"""
    temperature: float = 0.6
    repeats: int = 3
    profile: int = 0
    """decode steps to trace after the runs; 0: none"""
    trace: str | None = None
    """file for their Chrome trace; None: profile.json"""

    def __post_init__(self) -> None:
        for name in ("num_requests", "max_input", "max_output", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: {getattr(self, name)} found; at least 1 is allowed")
        if not 0 <= self.profile < self.max_output:
            most = f"0 to {self.max_output - 1} is allowed: the first of --max-output {self.max_output} tokens comes from the prompt's step"
            raise ConfigError(f"--profile: {self.profile} found; {most}")


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens each is continued by."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """tokens of the longest request, prompt and output together"""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))


def make_workload(options: Options) -> Workload:
    """Always the same for the same options."""
    draw = random.Random(SEED).randint
    shortest_in, shortest_out = min(SHORTEST, options.max_input), min(SHORTEST, options.max_output)
    prompts = [
        [draw(0, LARGEST_ID) for _ in range(draw(shortest_in, options.max_input))]  # the length is drawn first
        for _ in range(options.num_requests)
    ]
    return Workload(prompts, [draw(shortest_out, options.max_output) for _ in range(options.num_requests)])


def run(
    options: Options,
    make_llm: Callable[[], BenchLLM],
    *,
    say: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Load, warm up, measure; the report, ready for JSON. Raises ConfigError if a request cannot be served in full.

    `save` is called with the report of the runs before anything is traced, so that a trace that fails costs no figure.
    """
    # 1. Load.
    start = time.perf_counter()
    llm = make_llm()
    startup_s = time.perf_counter() - start
    try:
        config = effective_config(llm)
        workload = _fitting(make_workload(options), llm)
        say(_headline(config, workload, startup_s))
        # 2. Two small calls, so that nothing is measured that happens once.
        params = SamplingParams(temperature=options.temperature, ignore_eos=True, max_tokens=WARM_UP_TOKENS)
        for _ in range(NUM_WARM_UPS):
            llm.generate([workload.prompts[0]], [params])
        # 3. The clock.
        every = [replace(params, max_tokens=length) for length in workload.output_lens]
        runs = [_measure(llm, workload, every, number, say) for number in range(options.repeats)]
        median = statistics.median(one["output_tokens_per_s"] for one in runs)
        say(f"median of {len(runs)}: {median:,.1f} output tokens/s")
        report = {
            "benchmark": "offline",
            "command": sys.argv,
            "options": asdict(options),
            "num_prompt_tokens": workload.num_prompt_tokens,
            "num_output_tokens": workload.num_output_tokens,
            "output_tokens_per_s": median,
            "runs": runs,
            "startup_s": round(startup_s, 3),
            "config": config,
            "versions": versions(),
            "hardware": hardware(),
        }
        # 4. The trace, which no figure contains.
        if options.profile:
            from minisgl.bench.profile import profile  # loads torch

            save(report)
            report["profile"] = profile(llm, (workload.prompts, every), options.profile, Path(options.trace or DEFAULT_TRACE), say)
    finally:
        llm.close()
    return report


def _measure(llm: BenchLLM, workload: Workload, params: list[SamplingParams], number: int, say: Callable[[str], None]) -> dict[str, Any]:
    """One run over the whole workload, with nothing left of the runs before it."""
    llm.reset_prefix_cache()
    num_retractions = llm.num_retractions
    start = time.perf_counter()
    results = llm.generate(workload.prompts, params)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(result.token_ids) for result in results)
    if num_tokens != workload.num_output_tokens:
        errors = sorted({result.error for result in results if result.error is not None})
        raise WorkerError(f"{num_tokens} output tokens instead of {workload.num_output_tokens}; {'; '.join(errors) or 'no error was told'}")
    say(f"run {number + 1}: {seconds:.2f} s, {num_tokens / seconds:,.1f} output tokens/s")
    return {
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(num_tokens / seconds, 2),
        "num_retractions": llm.num_retractions - num_retractions,
        "num_cached_tokens": sum(result.num_cached_tokens for result in results),
    }


def _fitting(workload: Workload, llm: BenchLLM) -> Workload:
    """The workload with ids that the model has. Raises ConfigError if its longest request does not fit."""
    limits = llm.limits
    most = min(limits.max_seq_len, limits.num_pool_tokens)
    if workload.longest > most:
        raise ConfigError(
            f"the longest request has {workload.longest} tokens; the context holds {limits.max_seq_len} and the KV pool "
            f"{limits.num_pool_tokens}: lower --max-input or --max-output, or raise --max-seq-len or --num-pages"
        )
    if limits.vocab_size > LARGEST_ID:
        return workload
    return replace(workload, prompts=[[token_id % limits.vocab_size for token_id in prompt] for prompt in workload.prompts])


def effective_config(llm: BenchLLM) -> dict[str, Any]:
    """Every setting with the value that counts, 0 and "auto" replaced by what the machine decided."""
    import torch

    from minisgl.engine.engine import choose_dtype
    from minisgl.models.config import load_model_config
    from minisgl.models.resolve import resolve_model
    from minisgl.scheduler.scheduler import DEFAULT_EXTEND_BESIDE_DECODE

    config, limits = llm.config, llm.limits
    device = limits.device_type
    max_extend_tokens = config.max_extend_tokens or DEFAULT_EXTEND_TOKENS[device]
    beside = max_extend_tokens if config.offline_mode else DEFAULT_EXTEND_BESIDE_DECODE[device]
    dtype = choose_dtype(config, load_model_config(resolve_model(config.model_path)), torch.device(device))
    settings = {name: value for name, value in asdict(config).items() if name not in NOT_REPORTED}
    return settings | {
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "num_pages": limits.num_pages,
        "page_size": limits.page_size,
        "max_seq_len": limits.max_seq_len,
        "overlap": llm.is_overlapped,
        "tp_size": config.tp_info.size,
        "max_extend_tokens": max_extend_tokens,
        "max_extend_tokens_beside_decode": config.max_extend_tokens_beside_decode or beside,
    }


def _headline(config: dict[str, Any], workload: Workload, startup_s: float) -> str:
    return (
        f"{config['model_path']} on {config['device']}, dtype {config['dtype']}, {config['num_pages']:,} pages of {config['page_size']}, "
        f"ready in {startup_s:.1f} s\n{len(workload.prompts)} requests, {workload.num_prompt_tokens:,} prompt tokens, "
        f"{workload.num_output_tokens:,} output tokens"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this program; those of the engine come from the command line."""
    default = Options()
    parser.add_argument("--num-requests", type=int, default=default.num_requests, help="requests, all given at once (default: 256)")
    parser.add_argument("--max-input", type=int, default=default.max_input, help="tokens of the longest prompt (default: 1024)")
    parser.add_argument("--max-output", type=int, default=default.max_output, help="tokens of the longest output (default: 1024)")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="of the sampling; 0 is greedy (default: 0.6)")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="runs, of which the median counts (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="also write a report with versions, hardware and the effective settings")
    text = "after the runs, trace so many decode steps in a row and one prefill step, and tell where their time goes (default: 0)"
    parser.add_argument("--profile", type=int, default=default.profile, metavar="N", help=text)
    text = "Chrome trace that --profile writes; the prefill step's is prefill-FILE beside it (default: profile.json)"
    parser.add_argument("--trace", metavar="FILE", help=text)


def main(arguments: argparse.Namespace, make_llm: Callable[[], BenchLLM]) -> int:
    """The program: parsed arguments and what makes the engine -> exit status."""
    names = ("num_requests", "max_input", "max_output", "temperature", "repeats", "profile", "trace")
    options = Options(**{name: getattr(arguments, name) for name in names})
    # What is wrong is told before the model is loaded.
    SamplingParams(temperature=options.temperature)
    if options.profile and arguments.tp > 1:
        raise ConfigError(f"--profile {options.profile}: the ranks of --tp {arguments.tp} are other processes, not traced; leave out --tp")
    if options.trace is not None and not options.profile:
        raise ConfigError("--trace has no effect without --profile; add --profile N")
    trace = Path(options.trace or DEFAULT_TRACE)
    files = [("--json", Path(arguments.json))] if arguments.json is not None else []
    files += [("--trace", trace), ("--trace", trace.with_name(f"prefill-{trace.name}"))] if options.profile else []
    for flag, file in files:
        if not file.resolve().parent.is_dir():
            raise ConfigError(f"{flag} {file}: its folder does not exist; make it first")
        if file.is_dir() or not os.access(file if file.exists() else file.resolve().parent, os.W_OK):
            raise ConfigError(f"{flag} {file}: it is a folder, or cannot be written; name another file")
    if len({file.resolve() for _, file in files}) < len(files):
        raise ConfigError(f"--json {arguments.json}: --profile writes a trace there; name another file")

    def save(report: dict[str, Any]) -> None:
        if arguments.json is not None:
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    save(run(options, make_llm, save=save))
    return 0
