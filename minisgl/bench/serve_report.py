"""The figures of a run of the load client: from the outcomes of requests to values for JSON and lines for people.

Times are in milliseconds in what is returned. Knows no sockets and no processes. Called by `serve`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minisgl.bench.serve_client import Result
from minisgl.bench.serve_outcome import Outcome

__all__ = ["run_lines", "summarize", "summarize_errors"]

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
BUSY = 0.8
"""Share of a core from which a client process may have been the limit."""
SPREADS = {"ttft_ms": "first token", "gap_ms": "gap", "latency_ms": "whole answer"}


def summarize(results: Sequence[Result], *, is_rated: bool) -> dict[str, Any]:
    """The figures of one run; `is_rated` if requests came at a rate, each with a lane of its own."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    good = [outcome for outcome in outcomes if not outcome.problem]
    times = [np.frombuffer(outcome.token_times, np.float32) for outcome in good]
    seconds = max((each.start + each.seconds for each in outcomes), default=0.0) - min((each.start for each in outcomes), default=0.0)
    num_output = sum(_num_tokens(each) for each in good)
    num_prompt = sum(each.prompt_tokens or 0 for each in good)
    summary = {
        "num_succeeded": len(good),
        **summarize_errors(outcomes),
        "num_interrupted": sum(result.num_interrupted for result in results),
        "num_not_sent": sum(result.num_not_sent for result in results),
        "seconds": round(seconds, 4),
        "output_tokens": num_output,
        "prompt_tokens": num_prompt,
        "cached_tokens": _sum_given(each.cached_tokens for each in good),
        "num_without_usage": sum(each.output_tokens is None for each in good),
        "num_events": sum(map(len, times)),
        "finish_reasons": dict(Counter(str(each.finish_reason) for each in good).most_common()),
        "output_tokens_per_s": _per_second(num_output, seconds),
        "total_tokens_per_s": _per_second(num_output + num_prompt, seconds),
        "requests_per_s": _per_second(len(good), seconds),
        "all_streams": None if is_rated else _while_all_ran(outcomes),
        "ttft_ms": spread([float(each[0]) for each in times if len(each)]),
        "gap_ms": spread(np.concatenate([np.diff(each) for each in times]) if times else []),
        "latency_ms": spread([each.seconds for each in good]),
        "client": _client(results),
    }
    return summary


def summarize_errors(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many failed, by kind, with the words of the first of each."""
    bad = [outcome for outcome in outcomes if outcome.problem]
    details = {outcome.problem: outcome.detail for outcome in reversed(bad)}
    kinds = Counter(outcome.problem for outcome in bad).most_common()
    return {"num_failed": len(bad), "errors": {kind: {"count": count, "first": details[kind]} for kind, count in kinds}}


def spread(seconds: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """Mean, percentiles (interpolated) and maximum in milliseconds; None of nothing."""
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    if not len(values):
        return None
    found = dict(zip(PERCENTILES, np.percentile(values, list(PERCENTILES.values())), strict=True))
    return {name: round(float(value), 3) for name, value in {"mean": values.mean(), **found}.items()}


def _num_tokens(outcome: Outcome) -> int:
    """By the server's usage, else its events."""
    return len(outcome.token_times) // 4 if outcome.output_tokens is None else outcome.output_tokens


def _sum_given(counts: Iterable[int | None]) -> int | None:
    """None if no answer gives one."""
    given = [count for count in counts if count is not None]
    return sum(given) if given else None


def _per_second(number: float, seconds: float) -> float:
    return round(number / seconds, 2) if seconds > 0 else 0.0


def _while_all_ran(outcomes: Sequence[Outcome]) -> dict[str, float] | None:
    """Output tokens per second from the start of the last lane to the end of the first; None: they never ran all together."""
    lanes: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        lanes[outcome.lane].append(outcome)
    begin = max((each[0].start for each in lanes.values()), default=0.0)
    end = min((each[-1].start + each[-1].seconds for each in lanes.values()), default=0.0)
    if end <= begin:
        return None
    num_tokens = 0.0
    for outcome in outcomes:
        times = np.frombuffer(outcome.token_times, np.float32) + outcome.start
        if len(times) and not outcome.problem:
            num_tokens += np.count_nonzero((times >= begin) & (times < end)) * _num_tokens(outcome) / len(times)
    return {"seconds": round(end - begin, 4), "output_tokens_per_s": _per_second(num_tokens, end - begin)}


def _client(results: Sequence[Result]) -> dict[str, Any]:
    late = np.concatenate([np.frombuffer(result.lateness, np.float32) for result in results])
    shares = [result.cpu_seconds / result.seconds for result in results if result.seconds > 0]
    return {
        "num_processes": len(results),
        "cpu_seconds": round(sum(result.cpu_seconds for result in results), 3),
        "busiest_cpu_share": round(max(shares, default=0.0), 3),
        "late_ms": spread(late),
    }


def run_lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people."""
    lines = [f"requests       {summary['num_succeeded']:,} succeeded, {summary['num_failed']:,} failed, in {summary['seconds']:.2f} s"]
    left = {"num_interrupted": "interrupted", "num_not_sent": "not sent"}
    told = [f"{summary[name]:,} {words}" for name, words in left.items() if summary[name]]
    if told:
        lines.append(f"left over      {', '.join(told)}")
    lines += error_lines(summary["errors"])
    if not summary["num_succeeded"]:
        return [*lines, "no request has succeeded"]
    speed = f"{summary['output_tokens_per_s']:,.1f} output tokens/s, {summary['total_tokens_per_s']:,.1f} with the prompts"
    lines.append(f"throughput     {speed}, {summary['requests_per_s']:,.2f} requests/s")
    if (steady := summary["all_streams"]) is not None:
        lines.append(
            f"               {steady['output_tokens_per_s']:,.1f} output tokens/s in the {steady['seconds']:.2f} s when all streams ran"
        )
    lines.append(f"tokens         {_token_words(summary)}")
    names = list(PERCENTILES)
    lines.append(f"milliseconds   {''.join(f'{name:>10}' for name in names)}")
    for key, title in SPREADS.items():
        values = summary[key]
        lines.append(f"  {title:<13}{''.join(f'{values[name]:10,.1f}' for name in names) if values else '  none'}")
    return [*lines, *_client_lines(summary["client"])]


def error_lines(errors: dict[str, Any]) -> list[str]:
    """A line for each kind of failure."""
    return [f"  {kind}: {found['count']:,}, the first: {found['first'] or 'no more is known'}" for kind, found in errors.items()]


def _token_words(summary: dict[str, Any]) -> str:
    words = [f"{summary['prompt_tokens']:,} in", f"{summary['output_tokens']:,} out in {summary['num_events']:,} events"]
    if summary["cached_tokens"] is not None:
        words.append(f"{summary['cached_tokens']:,} of the prompts cached")
    if summary["num_without_usage"]:
        words.append(f"{summary['num_without_usage']:,} answers without usage, counted by events")
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in summary["finish_reasons"].items())
    return f"{', '.join(words)}; ended by {reasons}"


def _client_lines(client: dict[str, Any]) -> list[str]:
    number = client["num_processes"]
    late = client["late_ms"]
    words = f"{number} process{'es' if number > 1 else ''}, the busiest used {client['busiest_cpu_share']:.0%} of a core"
    if late is not None:
        words += f", woke up {late['p99']:.1f} ms late (p99; max {late['max']:.1f})"
    lines = [f"client         {words}"]
    if client["busiest_cpu_share"] >= BUSY:
        lines.append("               the client may have been the limit: raise --processes, or run it on other cores")
    return lines
