"""What the load client sends and when: everything is drawn from the seed, before anything is sent.

A lane is a sequence of conversations, each a sequence of turns; lanes run side by side. Knows no sockets. Called by `serve`, which draws
the plan, and by `serve_client`, which carries out a part of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from minisgl.bench.serve_http import Target
from minisgl.errors import ConfigError

__all__ = ["Conversation", "Endpoint", "Form", "Lane", "Options", "Plan", "Scale", "Turn", "make_lanes", "make_text", "parse_range"]

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
RAMP_UP_S = 5.0
PER_LONE_STREAM, PER_STREAM = 20, 8
"""Requests of a stream that is alone, and of one among several, where the number is not given."""
WORDS = (
    "time year way day thing man world life hand part child eye woman place work week case point company number group problem fact "
    "water house night room book story door car road tree river sea stone light sound name word line game team city town street "
    "school student teacher friend mother father family parent country state law war peace power money price market food bread milk "
    "good new first last long great little own other old right big high small large next early young few same able go make know take "
    "see come think look want give use find tell ask seem feel try leave call keep let begin help show hear play run move live believe"
)
"""Common ones: most tokenizers have each of them, with the space before it, as one token."""


@dataclass(frozen=True)
class Options:
    """The workload. The defaults are those by which servers are compared in docs/benchmarking.md."""

    streams: int = 64
    """lanes that run side by side; with `rate` only a factor of the number of conversations"""
    requests_per_stream: int = 0
    """conversations, one after the other; 0: 20 for a lone stream, else 8"""
    prompt_tokens: tuple[int, int] = (128, 640)
    answer_tokens: tuple[int, int] = (64, 448)
    ramp_up: float | None = None
    """seconds over which the lanes are started; None: 5, or with `rate` none"""
    rate: float = 0.0
    """conversations per second, at random moments; 0: lanes, each with one request at a time"""
    shared_prefix_tokens: int = 0
    """tokens before the prompt, the same in all conversations of a run"""
    turns: int = 1
    """requests of one conversation, each with all that was said before it"""
    temperature: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("streams", 1), ("requests_per_stream", 0), ("shared_prefix_tokens", 0), ("turns", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{_flag(name)}: {getattr(self, name)} found; at least {least} is allowed")
        for name in ("prompt_tokens", "answer_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"{_flag(name)}: {low}:{high} found; 1 <= LOW <= HIGH is wanted")
        for name, most in (("ramp_up", 1e6), ("rate", 1e6), ("temperature", 2.0)):
            if not 0 <= (getattr(self, name) or 0.0) <= most:
                raise ConfigError(f"{_flag(name)}: {getattr(self, name)} found; 0 to {most:g} is allowed")
        if self.rate and self.ramp_up is not None:
            raise ConfigError("--ramp-up and --rate found; requests that arrive at a rate have no lanes to start: leave one out")

    @property
    def effective(self) -> Options:
        """The same with nothing left open."""
        per_stream = self.requests_per_stream or (PER_LONE_STREAM if self.streams == 1 else PER_STREAM)
        ramp_up = RAMP_UP_S if self.ramp_up is None and not self.rate else self.ramp_up
        return replace(self, requests_per_stream=per_stream, ramp_up=ramp_up)

    @property
    def num_requests(self) -> int:
        return self.streams * self.effective.requests_per_stream * self.turns


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_range(flag: str, text: str) -> tuple[int, int]:
    """`LOW:HIGH`, or one number for both. Raises ConfigError."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} found; LOW:HIGH is wanted, such as 128:640, or one number") from None


@dataclass(frozen=True)
class Scale:
    """How many words make how many tokens."""

    tokens_per_word: float = 1.0
    tokens_around: float = 0.0
    """what a template adds to a prompt"""
    source: str = "an approximation, one token for each word: the server has neither /tokenize nor usage"

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.tokens_around) / self.tokens_per_word))

    def num_words_inside(self, num_tokens: int) -> int:
        """Of a part of a prompt."""
        return max(1, round(num_tokens / self.tokens_per_word)) if num_tokens else 0


@dataclass(frozen=True)
class Turn:
    num_words: int
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    number: int
    """its texts follow from it"""
    turns: list[Turn]


@dataclass(frozen=True)
class Lane:
    """Conversations that follow one another."""

    number: int
    start: float
    """seconds after the common start"""
    conversations: list[Conversation]


@dataclass(frozen=True)
class Form:
    """How a request is written."""

    endpoint: Endpoint
    model: str
    temperature: float
    limit_name: str = "max_tokens"
    extensions: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True, "stream_options": {"include_usage": True}})
    """fields that not every server knows"""

    def prompt(self, texts: Sequence[str]) -> dict[str, Any]:
        """Said by the user and the model in turn, the user last."""
        if self.endpoint == "completions":
            return {"prompt": "\n".join(texts)}
        return {"messages": [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]}

    def request(self, target: Target, texts: Sequence[str], max_tokens: int) -> bytes:
        """The whole HTTP request."""
        fixed = {"model": self.model, "temperature": self.temperature, "stream": True, self.limit_name: max_tokens}
        body = json.dumps(fixed | self.extensions | self.prompt(texts), separators=(",", ":")).encode()
        return target.request("POST", PATHS[self.endpoint], body)


@dataclass(frozen=True)
class Plan:
    """What one client process does in one run."""

    target: Target
    form: Form
    timeout: float
    """seconds of one request"""
    lanes: list[Lane]
    text_seed: str
    num_shared_words: int

    def text(self, conversation: Conversation, place: int) -> str:
        """What the user says in the turn at that place."""
        own = make_text(f"{self.text_seed}/{conversation.number}/{place}", conversation.turns[place].num_words)
        if place or not self.num_shared_words:
            return own
        return make_text(f"{self.text_seed}/shared", self.num_shared_words) + " " + own


def make_text(seed: str, num_words: int) -> str:
    """Always the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS.split(), k=num_words))


def make_lanes(options: Options, scale: Scale) -> list[Lane]:
    """All lanes. The numbers of tokens follow from the seed alone, whatever the rate, the ramp and the scale."""
    options = options.effective
    draw = random.Random(options.seed).randint
    conversations = [
        Conversation(
            number, [Turn(scale.num_words(draw(*options.prompt_tokens)), draw(*options.answer_tokens)) for _ in range(options.turns)]
        )
        for number in range(options.streams * options.requests_per_stream)
    ]
    if options.rate:
        arrivals = random.Random(f"{options.seed}/arrivals")
        moment = 0.0
        lanes = []
        for number, conversation in enumerate(conversations):
            moment += arrivals.expovariate(options.rate)
            lanes.append(Lane(number, moment, [conversation]))
        return lanes
    per_stream, step = options.requests_per_stream, (options.ramp_up or 0.0) / options.streams
    return [Lane(n, n * step, conversations[n * per_stream : (n + 1) * per_stream]) for n in range(options.streams)]
