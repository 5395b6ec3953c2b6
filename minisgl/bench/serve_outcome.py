"""What became of one request of the load client: read from the last events of its answer, when it has ended.

The only place where JSON of a stream is parsed. Knows no workload. Called by `serve_client` and `serve_prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.bench.serve_http import MALFORMED, AnswerReader

__all__ = ["Outcome", "answer_text", "judge"]

LONGEST_DETAIL = 300
"""characters"""
ERROR_EVENT = "error event"
NO_STREAM = "not a stream"
NO_ENDING = "stream without an ending"


@dataclass(frozen=True)
class Outcome:
    """One request that has ended. Counts of tokens are the server's own, None where it gives none."""

    lane: int
    start: float
    """seconds after the common start"""
    seconds: float
    """from sending it (or from connecting) to the end of the answer"""
    token_times: bytes
    """float32, seconds after `start`, one for each event that brought text"""
    problem: str = ""
    """kind of failure; empty: it succeeded"""
    detail: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None


def judge(reader: AnswerReader, lane: int = 0, origin: float = 0.0) -> Outcome:
    """The outcome of an answer that has ended; `origin` is the common start on the reader's clock."""
    problem, detail, ending = reader.problem, reader.detail, _Ending()
    if reader.status not in (0, 200):
        problem, detail = f"HTTP {reader.status}", _message_of(b"\n".join(reader.lines))
    elif reader.status == 200:
        ending = _read_ending(reader.lines)
        if ending.problem and (not problem or ending.problem == ERROR_EVENT):  # the server's own words say more than how it hung up
            problem, detail = ending.problem, ending.detail
    usage = ending.usage
    return Outcome(
        lane,
        reader.start - origin,
        reader.seconds,
        reader.token_times.tobytes(),
        problem,
        _one_line(detail),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(_dict(usage.get("prompt_tokens_details")).get("cached_tokens")),
        finish_reason=ending.finish_reason,
    )


def answer_text(reader: AnswerReader) -> str:
    """The text of an answer whose lines have all been kept."""
    choices = (_first_choice(event) for event in _events(reader.lines))
    return "".join(str(_dict(choice.get("delta")).get("content") or choice.get("text") or "") for choice in choices)


@dataclass
class _Ending:
    """What the events say of the end; filled while they are read."""

    problem: str = ""
    detail: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    is_done: bool = False


def _read_ending(lines: list[bytes]) -> _Ending:
    ending = _Ending(is_done=any(line[5:].strip() == b"[DONE]" for line in lines if line.startswith(b"data:")))
    try:
        for event in _events(lines):
            if event.get("error") is not None:
                ending.problem, ending.detail = ERROR_EVENT, _error_text(event)
                return ending
            ending.usage = _dict(event.get("usage")) or ending.usage
            reason = _first_choice(event).get("finish_reason")
            ending.finish_reason = str(reason) if reason else ending.finish_reason
    except msgspec.DecodeError as error:
        ending.problem, ending.detail = MALFORMED, f"an event is not JSON: {error}"
        return ending
    if not any(line.startswith(b"data:") for line in lines):
        text = b"\n".join(lines)
        is_error = b'"error"' in text
        ending.problem, ending.detail = ERROR_EVENT if is_error else NO_STREAM, _message_of(text)
    elif not ending.is_done and ending.finish_reason is None:
        ending.problem, ending.detail = NO_ENDING, "neither finish_reason nor [DONE]"
    return ending


def _events(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
            yield _dict(msgspec.json.decode(text))


def _first_choice(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    return _dict(choices[0]) if isinstance(choices, list) and choices else {}


def _message_of(body: bytes) -> str:
    """What an error's body says, in whatever shape."""
    try:
        return _error_text(_dict(msgspec.json.decode(body)))
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")


def _error_text(body: dict[str, Any]) -> str:
    error = body.get("error")
    text = error.get("message") if isinstance(error, dict) else error
    return str(text or body.get("message") or body.get("detail") or body)


def _one_line(text: str) -> str:
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= LONGEST_DETAIL else shown[:LONGEST_DETAIL] + "…"


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int else None
