"""What the load client asks a server before the clock runs: its model, which fields it takes, how many tokens a word has.

The small requests that find this out also warm the server up. Knows no processes and no report. Called by `serve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from minisgl.bench.serve_http import AnswerReader, Client, Target
from minisgl.bench.serve_outcome import Outcome, judge
from minisgl.bench.serve_plan import Endpoint, Form, Options, Scale, make_text

__all__ = ["Prepared", "prepare"]

SAMPLE_WORDS = (8, 32)
"""Words of the two texts whose tokens are counted."""
PROBE_TOKENS = 8
REFUSALS = (400, 422)
PASSING = ("HTTP 429", "HTTP 500", "HTTP 502", "HTTP 503", "HTTP 504")
"""What may be over when the load begins."""
WHAT_IS_LOST = {
    "ignore_eos": "answers end where the model ends them, and have fewer tokens than asked for",
    "stream_options": "there is no usage, and tokens are counted as events",
}


@dataclass(frozen=True)
class Prepared:
    """What the load needs to know of a server."""

    form: Form
    scale: Scale
    notes: list[str]
    """what is not as asked for"""


async def prepare(target: Target, options: Options, endpoint: Endpoint, model: str | None, timeout: float) -> Prepared | Outcome:
    """Ask; an Outcome is a failure that the load would only repeat."""
    with Client(target, timeout) as client:
        # 1. The model's name.
        if model is None:
            reader = await client.ask(target.request("GET", "/v1/models"))
            model = _first_model(reader)
            if model is None:
                return _no_model(reader)
        # 2. The fields that are taken; the answer's usage.
        probe = _Probe(client, target, Form(endpoint, model, options.temperature), options.seed)
        first, second = [await probe.ask(num_words) for num_words in SAMPLE_WORDS]
        for outcome in (first, second):
            if outcome.problem and outcome.problem not in PASSING:
                return outcome
            if outcome.problem:
                probe.notes.append(f"a request before the load has failed: {outcome.problem}, {outcome.detail}")
        # 3. Tokens of a word.
        source = "/tokenize"
        counts = [await probe.count_tokens(num_words) for num_words in SAMPLE_WORDS]
        if None in counts:
            source, counts = "the usage of two requests", [first.prompt_tokens, second.prompt_tokens]
        return Prepared(probe.form, _scale(counts, source), probe.notes)


class _Probe:
    """Asks for few tokens, in a form that changes where the server does not take it."""

    def __init__(self, client: Client, target: Target, form: Form, seed: int) -> None:
        self.client, self.target, self.form, self.seed = client, target, form, seed
        self.notes: list[str] = []

    async def ask(self, num_words: int) -> Outcome:
        while True:
            request = self.form.request(self.target, [self._text(num_words)], PROBE_TOKENS)
            reader = await self.client.ask(request)
            if reader.status not in REFUSALS or not self._give_way(b"".join(reader.lines)):
                return judge(reader)

    def _give_way(self, words: bytes) -> bool:
        """Leave out what is refused by its name; False: it is nothing that we could do without."""
        form = self.form
        if form.limit_name != "max_completion_tokens" and b"max_completion_tokens" in words:
            self.form = replace(form, limit_name="max_completion_tokens")
            self.notes.append("the server refuses max_tokens: max_completion_tokens is sent")
            return True
        refused = [name for name in form.extensions if name.encode() in words]
        if not refused:
            return False
        self.form = replace(form, extensions={name: value for name, value in form.extensions.items() if name not in refused})
        self.notes += [f"the server refuses {name}: {WHAT_IS_LOST[name]}" for name in refused]
        return True

    async def count_tokens(self, num_words: int) -> int | None:
        """Of a prompt, by /tokenize; None: there is none."""
        body = {"model": self.form.model, **self.form.prompt([self._text(num_words)])}
        answer = _json(await self.client.ask(self.target.request("POST", "/tokenize", msgspec.json.encode(body))))
        count = answer.get("count")
        return count if type(count) is int else None

    def _text(self, num_words: int) -> str:
        return make_text(f"{self.seed}/probe", num_words)


def _scale(counts: Sequence[int | None], source: str) -> Scale:
    few, many = counts
    if few is None or many is None or many <= few:
        return Scale()
    per_word = (many - few) / (SAMPLE_WORDS[1] - SAMPLE_WORDS[0])
    return Scale(per_word, max(0.0, few - SAMPLE_WORDS[0] * per_word), source)


def _first_model(reader: AnswerReader) -> str | None:
    models = _json(reader).get("data")
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


def _no_model(reader: AnswerReader) -> Outcome:
    outcome = judge(reader)
    if reader.status == 200 and not reader.problem:
        outcome = replace(outcome, problem="no model", detail="/v1/models names none")
    return replace(outcome, detail=f"{outcome.detail} (asked for /v1/models; --model NAME goes without it)")


def _json(reader: AnswerReader) -> dict[str, Any]:
    """The body of an answer that is an object; else empty."""
    if reader.status != 200 or reader.problem:
        return {}
    try:
        value = msgspec.json.decode(b"\n".join(reader.lines))
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
