"""Where the time of a step goes: decode steps and a prefill step of a workload under torch's profiler, beside what they need at least.

A schedule follows from its requests alone. So the workload runs twice: once to see its steps and take their time, once to trace the chosen
ones; on a GPU once before, which captures the graphs. There kernels count, those inside CUDA graphs too; on a CPU torch operations, by
self time. A name tells the class: what is fused counts where its kernel's name says, and what no pattern knows is `other`, whose names are
told. Knows the offline class only by what it calls. Called by `offline` and by benchmark/gpu/offline.py.

The floor of a class is the larger of bytes over the copy bandwidth and operations over the matrix product rate, both measured right before.
With s bytes in a number, T new tokens, S sampled rows, L layers, h hidden size, q = heads * head dim, k = KV heads * head dim, m MLP width,
A attended tokens (in pages and new, all rows together), P pairs of a new token and one that it sees, V vocabulary:

    attention         2 s L k A bytes, 4 L q P operations: K and V of all attended tokens are read once
    SiLU/MoE          3 s L T m bytes: both halves in, the product out
    norm              4 s h (2 L T + S) bytes: x and residual in and out; the last norm is of sampled rows
    rotation and K/V  2 s L T (q + 2 k) bytes: in and out, the norms of q and k included
    sampling          s S V bytes: logits are read once
    matrix products   s (W + h V) bytes, 2 (T W + S h V) operations, W = L (2 h q + 2 h k + 3 h m): each weight is read once

The head's h V counts where a row samples. A sparse layer of E experts, e for each token, has h E (its router) in place of 3 h m. Its
experts stand under SiLU/MoE (on a CPU their weights and operations under matrix products, which is what they are there): 3 s h m E
(1 - (1 - e/E)^T) bytes of those that an even routing touches, 3 s T e m in and out, and 6 h m e T operations.
Communication, copies and other have no floor: one rank could do without them.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity
from torch.utils.benchmark import Timer

from minisgl.core import Batch, Int32Array, SamplingParams
from minisgl.engine.base import BaseEngine, EngineLimits, StepHandle, StepLogprobs
from minisgl.engine.engine import choose_dtype
from minisgl.errors import ConfigError, WorkerError
from minisgl.models.config import ModelConfig, load_model_config
from minisgl.models.resolve import resolve_model

if TYPE_CHECKING:
    from minisgl.bench.offline import BenchLLM

__all__ = ["Rates", "WatchedStep", "choose_windows", "classify", "floors", "profile", "run_watched", "summarise", "wall_seconds"]

CLASSES = {
    "attention": r"attention|attn|fmha|mha_|sdpa|flash::|flash_fwd|(decode|prefill)_kernel|kvcache|mergestate|aten::index_(select|put_)$",
    "communication": r"nccl|all_?reduce|all_?gather|multimem|symm_mem|c10d",
    "SiLU/MoE": r"silu|swiglu|act_and_mul|moe|expert|^_(route|sort|product|sum)_kernel",
    "norm": r"norm(?!al)",
    "rotation and K/V": r"rope|rotary|index_?copy|reshape_and_cache|addcmul|aten::(cos|sin)$",
    "sampling": r"sampl|^_(adjust|bias|note|limits)_kernel|softmax|arg_?(max|min)|topk|radix|aten::(max|isfinite|bitwise|__)",
    "matrix products": r"gemm|nvjet|cutlass|gemv|splitk|matmul|linear|dot_kernel|reduce_1block|aten::(add|b|badd)?mm$",
    "copies": r"memcpy|memset|copy|clone|gather|index|embedding|fill|aten::(cat|to)$|catarray|^_(decode_inputs|update_page|remember)",
}
"""Class -> pattern of the names that belong to it, in lower case; the first that fits decides."""
OTHER = "other"
COPY_BYTES, MIN_SECONDS = 2**28, 0.5
LISTED, SHOWN = 16, 6
"""The largest names in the report and on the screen, of the known classes and of `other`."""
MATMUL_SIZES = {"cpu": (1024, 1024, 1024), "cuda": (8192, 4096, 8192)}


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at best."""

    copy: float
    """bytes per second, those read and those written together"""
    matmul: float
    """operations per second, two for each product that is added"""


@dataclass(slots=True)
class WatchedStep:
    """A launched step and its plan, and when what happened to it, in seconds of `time.perf_counter`."""

    batch: Batch
    handle: StepHandle
    submitted: float
    launched: float
    """`submit` has returned"""
    asked: float = 0.0
    """`read` was called"""
    arrived: float = 0.0
    """its tokens were there"""

    def read(self) -> Int32Array:
        self.asked = time.perf_counter()
        tokens = self.handle.read()
        self.arrived = time.perf_counter()
        return tokens

    def read_logprobs(self) -> StepLogprobs:
        return self.handle.read_logprobs()


class WatchedEngine:
    """An engine in front of another, which notes each step."""

    def __init__(self, engine: BaseEngine, before: Callable[[int], None] | None = None) -> None:
        """`before` is called with each step's number, counted from 0, before it is submitted."""
        self._engine, self._before = engine, before
        self.steps: list[WatchedStep] = []

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def cpu_group(self) -> Any:
        return self._engine.cpu_group

    def submit(self, batch: Batch) -> StepHandle:
        if self._before is not None:
            self._before(len(self.steps))
        submitted = time.perf_counter()
        self.steps.append(WatchedStep(batch, self._engine.submit(batch), submitted, time.perf_counter()))
        return self.steps[-1]

    def close(self) -> None:
        self._engine.close()


class _Tracer:
    """A profiler around each window of steps, with nothing in flight at either end."""

    def __init__(self, windows: dict[str, range], is_cuda: bool) -> None:
        self._windows, self._is_cuda = windows, is_cuda
        self._begin = 0.0
        self.traces: dict[str, torch.profiler.profile] = {}
        self.seconds: dict[str, float] = {}
        """of those that have ended"""

    def reach(self, step: int | None) -> None:
        """This step comes next; None: none comes."""
        for kind in [kind for kind in self.traces if kind not in self.seconds and step in (None, self._windows[kind].stop)]:
            self._wait()
            self.seconds[kind] = time.perf_counter() - self._begin
            self.traces[kind].stop()
        for kind in [kind for kind, window in self._windows.items() if window.start == step]:
            self._wait()
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + self._is_cuda]
            begun = torch.profiler.profile(activities=activities, acc_events=True)  # without it, torch warns of cycles that are not used
            begun.start()
            self.traces[kind] = begun
            self._begin = time.perf_counter()

    def events(self, kind: str) -> Iterable[Any]:
        found: Iterable[Any] = self.traces[kind].events()  # type: ignore[no-untyped-call]  # torch's own
        return found

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def profile(
    llm: BenchLLM, requests: tuple[list[list[int]], list[SamplingParams]], num_steps: int, trace: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Trace `num_steps` decode steps in a row and the largest prefill step of a workload; the report, ready for JSON.

    `requests`: prompts and what is asked for each, with two output tokens or more somewhere. The decode steps are those with the most rows;
    where fewer follow each other, that many are taken, and it is said. `trace`: the Chrome trace of the decode steps; that of the prefill
    step stands beside it as prefill-NAME.
    """
    is_cuda = llm.limits.device_type == "cuda"
    device, model = torch.device(llm.limits.device_type), load_model_config(resolve_model(llm.config.model_path))
    dtype = choose_dtype(llm.config, model, device)
    rates = measure_rates(device, dtype)
    say(f"profile: copies at {rates.copy / 1e9:,.1f} GB/s, matrix products at {rates.matmul / 1e12:,.3f} TFLOP/s, measured just now")
    for _ in range(1 + is_cuda):  # the first time, graphs are captured
        steps = run_watched(llm, requests)
    windows = choose_windows([step.batch for step in steps], num_steps)
    if (num_found := len(windows["decode"])) < num_steps:
        say(f"profile: {num_steps} steps wanted; the workload has only {num_found} decode steps in a row, which are traced")
    tracer = _Tracer(windows, is_cuda)
    try:
        traced = run_watched(llm, requests, tracer.reach)
    finally:
        tracer.reach(None)
    report: dict[str, Any] = {"device": device.type, "copy_bytes_per_s": rates.copy, "matmul_ops_per_s": rates.matmul, "steps": []}
    for kind, window in windows.items():
        taken = [traced[number].batch for number in window]
        counts = [(b.num_rows, b.num_tokens, int((b.cached_lens + b.extend_lens).sum())) for b in taken]
        rows, tokens, attended = (statistics.mean(column) for column in zip(*counts, strict=True))
        part = {"kind": kind, "num_steps": len(taken), "num_rows": rows, "num_tokens": tokens, "num_attended_tokens": attended}
        part |= summarise(tracer.events(kind), len(taken), is_cuda)
        least = [floors(model, dtype.itemsize, batch, rates, has_expert_kernel=is_cuda) for batch in taken]
        part["floor_us"] = {label: statistics.mean(step[label] for step in least) for label in least[0]}
        part["wall_us"] = wall_seconds(steps, window) / len(taken) * 1e6
        part["traced_wall_us"] = tracer.seconds[kind] / len(taken) * 1e6
        part["gap_us"] = part["wall_us" if is_cuda else "traced_wall_us"] - part["busy_us"]
        _print(part, say)
        if trace is not None:
            part["trace"] = str(trace if kind == "decode" else trace.with_name(f"{kind}-{trace.name}"))
            tracer.traces[kind].export_chrome_trace(part["trace"])
            if not Path(part["trace"]).is_file():  # torch only logs it
                raise ConfigError(f"--trace {part['trace']}: the trace could not be written there; name another file")
        report["steps"].append(part)
    return report


def run_watched(
    llm: BenchLLM, requests: tuple[list[list[int]], list[SamplingParams]], before: Callable[[int], None] | None = None
) -> list[WatchedStep]:
    """The steps that the requests take, with nothing cached before; `before` as in WatchedEngine."""
    llm.reset_prefix_cache()
    engine = llm.scheduler.engine
    watched = llm.scheduler.engine = WatchedEngine(engine, before)
    try:
        errors = [result.error for result in llm.generate(*requests) if result.error is not None]
    finally:
        llm.scheduler.engine = engine
    if errors:
        raise WorkerError(f"{len(errors)} requests failed, the first with: {errors[0]}; their steps are not those of the other run")
    return watched.steps


def wall_seconds(steps: Sequence[WatchedStep], window: range) -> float:
    """From the arrival of what came before the window to that of its last step: with overlap it is submitted while the one before runs.

    Where overlap is forced on a CPU, `submit` computes, and these are the times of the steps after.
    """
    return steps[window[-1]].arrived - (steps[window[0] - 1].arrived if window[0] else steps[0].submitted)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Copy bandwidth, and matrix product rate in `dtype`; medians over half a second each. Takes 0.5 GiB of the device's free memory."""

    def seconds(statement: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> float:
        first, second = (torch.ones(shape, dtype=dtype, device=device) for shape in shapes)
        names = {"first": first, "second": second, "linear": torch.nn.functional.linear}
        timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=MIN_SECONDS).median

    rows, inputs, outputs = MATMUL_SIZES[device.type]
    copy = seconds("first.copy_(second)", [(COPY_BYTES // 4,)] * 2, torch.float32)
    product = seconds("linear(first, second)", [(rows, inputs), (outputs, inputs)], dtype)
    return Rates(2 * COPY_BYTES / copy, 2 * rows * inputs * outputs / product)


def choose_windows(batches: Sequence[Batch], num_steps: int) -> dict[str, range]:
    """Numbers of the steps to trace: `num_steps` decode steps in a row, or the most there are, with the most rows; one prefill step.

    Of several such runs of decode steps the middle one is taken; of the prefill steps the largest, and the last of those. There must be a
    decode step; without a prefill step there is no such window.
    """
    length = min(num_steps, max(len(list(run)) for is_decode, run in groupby(batch.is_decode for batch in batches) if is_decode))
    rows = [batch.num_rows if batch.is_decode else 0 for batch in batches]
    sums = {start: sum(rows[start : start + length]) for start in range(len(rows) - length + 1) if all(rows[start : start + length])}
    most = max(sums.values())
    widest = [start for start, total in sums.items() if total == most]
    first = widest[len(widest) // 2]
    prefills = sorted((batch.num_tokens, step) for step, batch in enumerate(batches) if not batch.is_decode)
    windows = {"decode": range(first, first + length)}
    if prefills:
        windows["prefill"] = range(prefills[-1][1], prefills[-1][1] + 1)
    return windows


def classify(names: Iterable[str]) -> str:
    """The class of a kernel or an operation: that of the first name that is known. For an operation those around it come first."""
    known = (label for name in names for label, pattern in CLASSES.items() if re.search(pattern, name.lower()))
    return next(known, OTHER)


def summarise(events: Iterable[Any], num_steps: int, is_cuda: bool) -> dict[str, Any]:
    """Microseconds per step of a profiler's events: by class, their sum, the time in which any ran, and the largest names."""
    us: defaultdict[tuple[str, str], float] = defaultdict(float)
    calls = Counter[tuple[str, str]]()
    spans = []
    for event in events:
        if event.device_type.name != ("CUDA" if is_cuda else "CPU") or event.is_user_annotation:
            continue
        names, outer = [event.name], None if is_cuda else event.cpu_parent
        while outer is not None:
            names, outer = [outer.name, *names], outer.cpu_parent
        key = classify(names), event.name
        us[key] += (event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total) / num_steps
        calls[key] += 1
        spans.append((event.time_range.start, event.time_range.end))
    busy = end = 0.0
    for first, last in sorted(spans):
        busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
    by_class = {label: sum(own for key, own in us.items() if key[0] == label) for label in (*CLASSES, OTHER)}
    rows = [
        {"class": key[0], "name": key[1], "us": us[key], "calls": calls[key] / num_steps} for key in sorted(us, key=lambda key: -us[key])
    ]
    known, other = ([row for row in rows if (row["class"] == OTHER) is wanted][:LISTED] for wanted in (False, True))
    sums = {"sum_us": sum(us.values()), "busy_us": busy / num_steps}
    return {"us": by_class, **sums, "largest": known, "largest_other": other}


def floors(model: ModelConfig, number_bytes: int, batch: Batch, rates: Rates, *, has_expert_kernel: bool = True) -> dict[str, float]:
    """Microseconds that one step needs at least, by class; the formulas stand at the file's top.

    Without a kernel of their own, on a CPU, experts are matrix products by name, and so are their weights and operations here.
    """
    attention, moe, hidden, num_layers = model.attention, model.moe, model.hidden_size, model.num_layers
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    num_tokens, num_sampled = batch.num_tokens, len(batch.sample_rows)
    num_sparse = 0 if moe is None else sum(map(moe.is_sparse, range(num_layers)))
    width = (num_layers - num_sparse) * model.intermediate_size  # of all dense layers together
    layers, head = hidden * (2 * num_layers * (q + kv) + 3 * width), hidden * model.vocab_size
    chosen, touched = 0, 0.0
    if moe is not None:
        layers += num_sparse * hidden * moe.num_experts
        chosen = num_sparse * moe.num_experts_per_token * moe.intermediate_size
        share = 1 - (1 - moe.num_experts_per_token / moe.num_experts) ** num_tokens
        touched = 3 * hidden * num_sparse * moe.num_experts * moe.intermediate_size * share
    cached, new = batch.cached_lens.astype(int), batch.extend_lens.astype(int)
    attended, pairs = int((cached + new).sum()), int((new * cached + new * (new + 1) // 2).sum())
    needs: dict[str, tuple[float, float]] = {  # numbers moved, operations
        "attention": (2 * num_layers * kv * attended, 4 * num_layers * q * pairs),
        "SiLU/MoE": (3 * num_tokens * (width + chosen), 0),
        "norm": (4 * hidden * (2 * num_layers * num_tokens + num_sampled), 0),
        "rotation and K/V": (2 * num_layers * num_tokens * (q + 2 * kv), 0),
        "sampling": (num_sampled * model.vocab_size, 0),
        "matrix products": (layers + head * min(num_sampled, 1), 2 * (num_tokens * layers + num_sampled * head)),
    }
    place = "SiLU/MoE" if has_expert_kernel else "matrix products"
    needs[place] = (needs[place][0] + touched, needs[place][1] + 6 * hidden * num_tokens * chosen)
    return {label: max(number_bytes * moved / rates.copy, operations / rates.matmul) * 1e6 for label, (moved, operations) in needs.items()}


def _print(part: dict[str, Any], say: Callable[[str], None]) -> None:
    counts = f"{part['num_rows']:,.10g} rows, {part['num_tokens']:,.10g} new tokens, {part['num_attended_tokens']:,.10g} attended"
    say(f"\n{part['kind']}, {part['num_steps']} traced; a step has {counts}\n  {'class':<20}{'us a step':>12}{'floor':>12}{'ratio':>8}")
    least = part["floor_us"]
    lines = [(label, own, least.get(label, 0.0)) for label, own in part["us"].items()]
    for label, own, floor in [*lines, ("sum", part["sum_us"], sum(least.values()))]:
        ratio = f"{own / floor:.2f}" if own and floor else "-"
        say(f"  {label:<20}{own:>12,.1f}{f'{floor:,.1f}' if floor else '-':>12}{ratio:>8}")
    for label, name in (("busy", "busy_us"), ("wall time", "wall_us"), ("wall time, traced", "traced_wall_us"), ("gap", "gap_us")):
        say(f"  {label:<20}{part[name]:>12,.1f}")
    for row in part["largest"][:SHOWN] + part["largest_other"][:SHOWN]:
        say(f"    {row['class']}: {row['us']:,.1f} us in {row['calls']:,.4g} of {row['name'][:90]}")
