"""The values that every part of minisgl speaks of: sampling parameters, a request, a step's plan, a forward's context.

This module knows no model, no device, no socket and does not import torch: the API and tokenizer processes use it too.

Letters: T new tokens in a step, B rows (requests) in a step, S rows that sample, U page-table writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from minisgl.errors import RequestError

__all__ = [
    "Batch",
    "Context",
    "FinishReason",
    "Int32Array",
    "Req",
    "RequestState",
    "SamplingParams",
    "SlotSetup",
    "TokenLogprobs",
    "split_choices",
]

Int32Array = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort", "error"]

NUMBER_RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 10.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
)
MAX_CHOICES, MAX_LOGPROBS = 16, 20
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS, MAX_BIASES = 16, 256, 64, 1024
SEED_STEP = 0x9E3779B97F4A7C15
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing fp32 logits by less would overflow before it changed a choice."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Checked on construction; raises RequestError naming the field."""

    temperature: float = 0.0
    """Logits are divided by it; 0 (or below 1e-5) is greedy. 0 to 2."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 or -1 is off."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; above 0, 1 is off."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability; 0 is off."""
    seed: int | None = None
    """Noise is a function of seed and position; None takes one for the request. 0 to 2**64 - 1."""
    repetition_penalty: float = 1.0
    """Tokens of prompt and output become less likely above 1, likelier below; 0.01 to 10."""
    frequency_penalty: float = 0.0
    """Subtracted once per time a token stands in the output; -2 to 2."""
    presence_penalty: float = 0.0
    """Subtracted from tokens that stand in the output; -2 to 2."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids before anything else; at most 1,024 entries, -100 to 100 each."""
    min_tokens: int = 0
    """No end id is sampled before so many tokens of output."""
    max_tokens: int | None = None
    """Most new tokens; None means as many as context and pool leave."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; at most 16 of up to 256 characters."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end the request, besides the model's own; at most 64."""
    ignore_eos: bool = False
    """Run on after an end-of-sequence token; `stop_token_ids` still end it."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    n: int = 1
    """Independent outputs; each is a request of its own to the scheduler, with a seed of its own. 1 to 16."""
    logprobs: int | None = None
    """Log probabilities of each sampled token and of so many likeliest ones, of the raw logits; 0 to 20, None is off."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first; the prompt is then computed whole, without a cached prefix."""

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name, low, high in NUMBER_RANGES:
            check_number(name, getattr(self, name), low, high)
        if self.top_p == 0:
            raise RequestError("top_p: 0 found; a number above 0 is wanted", param="top_p")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}: {shown(getattr(self, name))} found; True or False is wanted", param=name)
        check_integer("top_k", self.top_k, -1, 2**31 - 1)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens: {self.min_tokens} found; max_tokens is {self.max_tokens}", param="min_tokens")
        self._check_ends()
        self._check_bias()

    def _check_ends(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else check_list("stop", self.stop, "a string or a list of strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", check_list("stop_token_ids", self.stop_token_ids, "a list of token ids"))
        if len(stop) > MAX_STOPS:
            raise RequestError(f"stop: {len(stop)} strings found; at most {MAX_STOPS} are allowed", param="stop")
        for text in stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                found = f"{len(text)} characters" if isinstance(text, str) else shown(text)
                raise RequestError(f"stop: {found} found; each stop is a string of 1 to {MAX_STOP_LENGTH} characters", param="stop")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise RequestError(f"stop: {shown(text)} found, with an unpaired surrogate; send valid Unicode", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids: {len(self.stop_token_ids)} found; at most {MAX_STOP_IDS}", param="stop_token_ids")
        for token_id in self.stop_token_ids:
            check_integer("stop_token_ids", token_id, 0, 2**31 - 1)

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MAX_BIASES:
            found = f"{len(self.logit_bias)} entries" if isinstance(self.logit_bias, dict) else shown(self.logit_bias)
            wanted = f"a mapping of at most {MAX_BIASES} token ids to numbers is wanted"
            raise RequestError(f"logit_bias: {found} found; {wanted}", param="logit_bias")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            check_integer("logit_bias", token_id, 0, 2**31 - 1)
            check_number("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def split_choices(params: SamplingParams) -> list[SamplingParams]:
    """Parameters of the n single requests that `params` stands for. Choice i of a seeded request uses seed + i * 0x9E3779B97F4A7C15."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else (params.seed + choice * SEED_STEP) % 2**64 for choice in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raise RequestError unless `value` is an int (no bool) with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: {shown(value)} found; an integer is wanted", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name}: {shown(value)} found; {low} to {high} is allowed", param=name)


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise RequestError unless `value` is a finite number with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"{name}: {shown(value)} found; a finite number is wanted", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name}: {shown(value)} found; {low:g} to {high:g} is allowed", param=name)


def check_list(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    """`value` as a tuple. Raise RequestError unless it is a list or a tuple."""
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name}: {shown(value)} found; {wanted} is wanted", param=name)
    return tuple(value)


def shown(value: Any) -> str:
    """`value` for an error message, at most some 60 characters long, whatever a request holds."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class RequestState(Enum):
    """Where a request stands. The moves between them are in `scheduler/states.py` and nowhere else."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


CACHED, DEVICE, HOST, MAX_DEVICE = range(4)
"""Columns of a request's `lengths`, all in tokens."""
NUM_LENGTHS = 4


@dataclass(slots=True, eq=False)
class Req:
    """One request on its way. The one mutable object of the scheduler.

    Invariant while it is not finished, after every step:
    `cached_len < device_len <= max_device_len` and `host_len <= device_len`. `device_len` may run ahead of `host_len` by the one token
    that the step in flight samples.

    `tokens` and `lengths` are the request's own arrays while it waits, and views of its row in the scheduler's table while it
    holds a slot: the scheduler updates whole columns at once and this object shows the same numbers.
    """

    uid: int
    sampling_params: SamplingParams
    tokens: Int32Array
    """Token ids known to the host, prompt first; valid up to `host_len`."""
    lengths: Int32Array
    """[cached_len, device_len, host_len, max_device_len]"""
    num_prompt_tokens: int
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    slot: int = -1
    """Row in the scheduler's tables, -1 while it holds none."""
    num_scored: int = 0
    """Prompt tokens whose successors' log probabilities have been planned."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied at the first admission."""
    num_retractions: int = 0
    """How often it gave its pages back to others and started again."""
    cache_handle: Any = None
    """What keeps this request's shared prefix locked in the prefix cache."""
    cache_salt: str | None = None
    """Cached prefixes are shared only within one salt."""
    end_ids: frozenset[int] = frozenset()
    """Token ids that end this request besides the model's own."""

    @classmethod
    def from_prompt(cls, uid: int, prompt: Int32Array, params: SamplingParams, max_device_len: int, end_ids: frozenset[int]) -> Req:
        """A waiting request. `prompt` is int32 [n], n >= 1; `max_device_len` is prompt plus output, in tokens."""
        num_tokens = len(prompt)
        lengths = np.array([0, num_tokens, num_tokens, max_device_len], dtype=np.int32)
        return cls(uid, params, np.array(prompt, dtype=np.int32), lengths, num_tokens, end_ids=end_ids)

    @property
    def cached_len(self) -> int:
        """Tokens whose K/V is (or, for a step in flight, will be) valid in pages."""
        return int(self.lengths[CACHED])

    @property
    def device_len(self) -> int:
        """Tokens known to the device."""
        return int(self.lengths[DEVICE])

    @property
    def host_len(self) -> int:
        """Tokens known to the host."""
        return int(self.lengths[HOST])

    @property
    def max_device_len(self) -> int:
        """The most tokens this request may reach."""
        return int(self.lengths[MAX_DEVICE])

    @property
    def extend_len(self) -> int:
        """Tokens that are still to be computed before the next one can be sampled."""
        return self.device_len - self.cached_len


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural, of the raw logits in fp32) at one position; None stands for one that is not finite."""

    token_id: int
    """the token that stands there"""
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    """the likeliest tokens, likeliest first"""
    top_logprobs: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SlotSetup:
    """How a slot samples from now on, and what its request has said so far."""

    slot: int
    params: SamplingParams
    seed: int
    """64 bits"""
    end_ids: frozenset[int]
    """token ids that may not be sampled before `params.min_tokens`"""
    prompt: Int32Array
    """[n] the prompt's tokens"""
    output: Int32Array
    """[m] tokens sampled before the request was retracted"""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's plan, a value: who runs, which tokens, where their K/V goes. The engine needs nothing else.

    Rows are ordered by uid. The arrays are int32 on the host; they are views of `buffer`, which holds nothing else, so that a
    device backend copies one block a step. `layout` names each view: field -> (start, end) in `buffer`.
    """

    step: int
    uids: tuple[int, ...]
    """[B], ascending"""
    buffer: Int32Array
    layout: dict[str, tuple[int, int]]
    setups: tuple[SlotSetup, ...] = ()
    """Sampling state of slots that sample for the first time since their request took them."""

    def view(self, name: str) -> Int32Array:
        start, end = self.layout[name]
        return self.buffer[start:end]

    @property
    def slots(self) -> Int32Array:
        """[B] page-table row of each request"""
        return self.view("slots")

    @property
    def cached_lens(self) -> Int32Array:
        """[B] tokens already in pages before this step"""
        return self.view("cached_lens")

    @property
    def extend_lens(self) -> Int32Array:
        """[B] new tokens computed in this step, >= 1"""
        return self.view("extend_lens")

    @property
    def input_ids(self) -> Int32Array:
        """[T] token ids, rows one after the other; -1: the token this slot sampled last, which only the device knows"""
        return self.view("input_ids")

    @property
    def positions(self) -> Int32Array:
        """[T] index of each new token in its sequence"""
        return self.view("positions")

    @property
    def write_slots(self) -> Int32Array:
        """[T] page * page_size + offset that takes the token's K/V"""
        return self.view("write_slots")

    @property
    def sample_rows(self) -> Int32Array:
        """[S] rows (0..B-1, ascending) whose last token's logits are sampled"""
        return self.view("sample_rows")

    @property
    def prompt_targets(self) -> Int32Array:
        """[L, 3] (token index 0..T-1, token id that follows it, likeliest tokens wanted): log probabilities of prompt tokens"""
        return self.view("prompt_targets").reshape(-1, 3)

    @property
    def table_updates(self) -> Int32Array:
        """[U, 3] page-table writes (row, column, page) to apply before the step"""
        return self.view("table_updates").reshape(-1, 3)

    @property
    def num_rows(self) -> int:
        return len(self.uids)

    @property
    def num_tokens(self) -> int:
        start, end = self.layout["input_ids"]
        return end - start

    @property
    def is_decode(self) -> bool:
        """True if every row computes exactly one token and samples."""
        return self.num_tokens == self.num_rows == len(self.sample_rows)


BATCH_FIELDS = (
    "slots",
    "cached_lens",
    "extend_lens",
    "input_ids",
    "positions",
    "write_slots",
    "sample_rows",
    "table_updates",
    "prompt_targets",
)
NO_INT32 = np.empty(0, dtype=np.int32)


def make_batch(step: int, uids: tuple[int, ...], arrays: dict[str, npt.NDArray[Any]], setups: tuple[SlotSetup, ...] = ()) -> Batch:
    """Pack the arrays named in BATCH_FIELDS into one buffer. A missing one is empty; those of three columns
    may be [n, 3]."""
    layout: dict[str, tuple[int, int]] = {}
    end = 0
    for name in BATCH_FIELDS:
        start, end = end, end + arrays.get(name, NO_INT32).size
        layout[name] = (start, end)
    buffer = np.empty(end, dtype=np.int32)
    for name, (start, stop) in layout.items():
        if stop > start:
            buffer[start:stop] = arrays[name].reshape(-1)
    return Batch(step, uids, buffer, layout, setups)


@dataclass(frozen=True, slots=True)
class Context:
    """What a model's forward needs besides the token ids: passive, made anew for each step.

    `attention` stores K/V and attends (`attention.base.BaseAttentionBackend`), `metadata` is what that backend prepared for this step,
    `positions` is an int64 tensor [T], and `comm` reduces partial sums over the ranks (`distributed.Communicator`).
    """

    attention: Any
    metadata: Any
    positions: Any
    comm: Any
