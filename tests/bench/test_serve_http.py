"""The load client's reading of HTTP: the same answer however its bytes are cut, events counted as a JSON parser would, faults named."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.bench.serve_http import CLOSED_EARLY, CLOSED_MIDWAY, MALFORMED, AnswerReader, Target, parse_url
from minisgl.bench.serve_outcome import answer_text, judge
from minisgl.errors import ConfigError

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def chat_event(text: str | None, **fields) -> dict:
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": None}], **fields}


EVENTS = [
    chat_event(""),
    chat_event("One"),
    chat_event(' "content":"two"\n\ndata: '),
    chat_event("ü😀"),
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
    {"choices": [], "usage": USAGE},
]
TEXTS = [json.dumps(event) for event in EVENTS] + ["[DONE]"]


def lines_of(texts: list[str], end: str = "\n") -> list[bytes]:
    return [f"data: {text}{end}{end}".encode() for text in texts]


def chunked(pieces: list[bytes], trailer: bytes = b"") -> bytes:
    return b"".join(b"%X;x=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"


def head(*lines: str, status: str = "200 OK", version: str = "1.1") -> bytes:
    return "\r\n".join([f"HTTP/{version} {status}", "Content-Type: text/event-stream", *lines, "", ""]).encode()


BODY = b"".join(lines_of(TEXTS))
ANSWERS = {
    "a chunk per event": head("Transfer-Encoding: chunked") + chunked(lines_of(TEXTS)),
    "chunks across events": head("transfer-encoding: chunked") + chunked([BODY[at : at + 50] for at in range(0, len(BODY), 50)]),
    "lines that end as in HTTP": head("Transfer-Encoding: chunked") + chunked(lines_of(TEXTS, "\r\n"), b"Digest: x\r\n"),
    "a length": head(f"Content-Length: {len(BODY)}") + BODY,
    "an interim answer first": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + head(f"content-length:{len(BODY)}") + BODY,
    "pings between": head("Transfer-Encoding: chunked") + chunked([b": ping\n\n", *lines_of(TEXTS), b": ping\n\n"]),
}


def read(pieces: list[bytes], *, keeps_all: bool = True) -> AnswerReader:
    """An answer whose pieces come a second apart; its end is seen with the last one and not before."""
    reader = AnswerReader(100.0, keeps_all=keeps_all)
    ends = [reader.feed(piece, 101.0 + place) for place, piece in enumerate(pieces)]
    assert ends == [False] * (len(pieces) - 1) + [True]
    return reader


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(set(places) - {0, len(data)}), len(data)]
    return [data[begin:end] for begin, end in pairwise(borders)]


def check(reader: AnswerReader) -> None:
    outcome = judge(reader)
    assert (outcome.problem, outcome.finish_reason) == ("", "length")
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (7, 3, 4)
    assert len(reader.token_times) == 3
    assert answer_text(reader) == 'One "content":"two"\n\ndata: ü😀'
    assert reader.is_reusable


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_may_be_cut_anywhere(answer):
    check(read([answer]))
    check(read([answer[place : place + 1] for place in range(len(answer))]))
    for place in range(1, len(answer)):
        check(read(cut(answer, [place])))


@given(st.sampled_from(list(ANSWERS.values())), st.lists(st.integers(0, 1500), max_size=20))
def test_an_answer_may_be_cut_in_many_places(answer, places):
    check(read(cut(answer, [place % len(answer) for place in places])))


def test_the_time_of_an_event_is_that_of_the_read_that_completed_it():
    first, second, third = lines_of([TEXTS[1], TEXTS[2], TEXTS[3]])
    reader = AnswerReader(100.0)
    start = head()
    for now, piece in ((101.0, start + first[:-2]), (102.0, first[-2:]), (104.0, second + third)):
        assert not reader.feed(piece, now)
    assert list(reader.token_times) == [2.0, 4.0, 4.0]


TEXT = st.text(alphabet='ab"\\:n\n ü{}', max_size=6) | st.sampled_from(["", '"content":"x', "data: {}"])
EVENT = st.one_of(
    TEXT.map(chat_event),
    TEXT.map(lambda text: chat_event(text, logprobs={"content": [{"token": text}]})),
    TEXT.map(lambda text: {"choices": [{"delta": {"reasoning_content": text, "role": "assistant"}}]}),
    TEXT.map(lambda text: {"choices": [{"text": text, "index": 0}]}),
    st.just({"choices": [], "usage": USAGE}),
)


def brings_text(event: dict) -> bool:
    """The slow twin."""
    return any(choice.get("text") or any(map(choice.get("delta", {}).get, ("content", "reasoning_content"))) for choice in event["choices"])


@given(st.lists(EVENT, max_size=12), st.sampled_from([(", ", ": "), (",", ":")]), st.data())
def test_events_are_counted_as_if_they_had_been_parsed(events, separators, data):
    lines = lines_of([json.dumps(event, separators=separators) for event in events])
    body = b"".join(lines)
    reader = AnswerReader(0.0)
    reader.feed(head(), 0.0)
    for piece in cut(body, data.draw(st.lists(st.integers(0, len(body)), max_size=6))) if body else []:
        reader.feed(piece, 1.0)
    assert len(reader.token_times) == sum(map(brings_text, events))


def test_only_the_end_of_an_answer_is_kept_unless_all_is_wanted():
    events = lines_of([json.dumps(chat_event(f"{number:05}")) for number in range(1000)] + TEXTS[-3:])
    reader = read(
        [head("Transfer-Encoding: chunked"), *(b"%x\r\n%s\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"], keeps_all=False
    )
    assert len(reader.lines) < 20
    assert len(reader.token_times) == 1000
    assert judge(reader).output_tokens == 3


def test_an_answer_without_a_length_ends_with_its_connection():
    reader = AnswerReader(0.0, keeps_all=True)
    assert not reader.feed(head() + BODY, 1.0)
    reader.close(5.0)
    assert (judge(reader).problem, judge(reader).output_tokens, reader.seconds, reader.is_reusable) == ("", 3, 5.0, False)


FAULTS = {
    "nothing": (b"", CLOSED_EARLY),
    "half a head": (b"HTTP/1.1 200 OK\r\nCont", CLOSED_MIDWAY),
    "half a chunk": (head("Transfer-Encoding: chunked") + b"50\r\ndata: {", CLOSED_MIDWAY),
    "no last chunk": (head("Transfer-Encoding: chunked") + chunked(lines_of(TEXTS))[:-5], CLOSED_MIDWAY),
    "less than its length": (head("Content-Length: 100") + b"data: {}\n\n", CLOSED_MIDWAY),
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", MALFORMED),
    "a strange status": (b"HTTP/1.1 fine\r\n\r\n", MALFORMED),
    "a status of nothing": (b"HTTP/1.1 000 X\r\n\r\n", MALFORMED),
    "a strange size of a chunk": (head("Transfer-Encoding: chunked") + b"0x5\r\nabcde\r\n", MALFORMED),
    "a negative size": (head("Transfer-Encoding: chunked") + b"-5\r\nabcde\r\n", MALFORMED),
    "a chunk that is too long": (head("Transfer-Encoding: chunked") + b"3\r\nabcde\r\n", MALFORMED),
    "a size that does not end": (head("Transfer-Encoding: chunked") + b"1" * 70_000, MALFORMED),
    "a head that does not end": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, MALFORMED),
    "a strange length": (head("Content-Length: +5") + b"abcde", MALFORMED),
    "an event that is no JSON": (head() + b"data: {nonsense\n\n", MALFORMED),
    "no ending": (head() + lines_of(TEXTS)[1], "stream without an ending"),
    "no stream": (head() + b'{"choices": []}', "not a stream"),
    "an error in the stream": (head() + lines_of([TEXTS[1], '{"error": {"message": "tired"}}'])[1], "error event"),
    "an error, then cut off": (head("Transfer-Encoding: chunked") + b'1d\r\ndata: {"error":{"message":1}}\n', "error event"),
    "an error instead of a stream": (head() + b'{"error": "tired"}', "error event"),
    "too many requests": (head("Content-Length: 5", status="429 Too Many") + b"later", "HTTP 429"),
    "an error whose body is cut off": (head("Content-Length: 50", status="500 X") + b"oh", "HTTP 500"),
}


@pytest.mark.parametrize(("data", "problem"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_has_a_name(data, problem):
    for pieces in ([data], [data[place : place + 1] for place in range(min(len(data), 500))] + [data[500:]]):
        reader = AnswerReader(0.0)
        if not any(reader.feed(piece, 1.0) for piece in pieces if piece):
            reader.close(2.0)
        assert judge(reader).problem == problem
        assert judge(reader).detail or problem == "HTTP 500"


def test_what_a_server_says_is_told_in_one_line_without_control_characters():
    body = json.dumps({"error": {"message": "no\nsuch \x1b[31mmodel" + "x" * 1000}}).encode()
    detail = judge(read([head(f"Content-Length: {len(body)}", status="404 Not Found") + body])).detail
    assert detail.startswith("no such  [31mmodelxxx")
    assert len(detail) < 400


@pytest.mark.parametrize(
    ("answer", "is_reusable"),
    [
        (head("Content-Length: 0", "Connection: close"), False),
        (head("Content-Length: 0", version="1.0"), False),
        (head("Content-Length: 0", "Connection: keep-alive", version="1.0"), True),
        (head(status="204 No Content"), True),
        (head("Content-Length: 1") + b"xy", False),
    ],
)
def test_a_connection_is_used_again_only_where_that_is_safe(answer, is_reusable):
    assert read([answer]).is_reusable is is_reusable


def test_a_request_is_whole():
    target = parse_url("http://[::1]:8000/some/v1/", "key")
    assert target == Target("::1", 8000, "[::1]:8000", False, "/some", "key")
    top, _, body = target.request("POST", "/v1/models", b"{}").partition(b"\r\n\r\n")
    assert body == b"{}"
    assert top.split(b"\r\n")[:2] == [b"POST /some/v1/models HTTP/1.1", b"Host: [::1]:8000"]
    assert {b"Authorization: Bearer key", b"Content-Length: 2"} <= set(top.split(b"\r\n"))
    assert "key" not in repr(target)


@pytest.mark.parametrize(
    ("url", "port", "is_tls", "prefix"),
    [("http://a", 80, False, ""), ("https://a/v1", 443, True, ""), ("https://a.b:1/x/", 1, True, "/x")],
)
def test_a_url_may_be_the_root_or_its_v1(url, port, is_tls, prefix):
    target = parse_url(url)
    assert (target.port, target.is_tls, target.prefix) == (port, is_tls, prefix)


@pytest.mark.parametrize(
    "url", ["a:80", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://u:p@a", "http://a/?x", "http://a/ b", "http://ä"]
)
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="--url"):
        parse_url(url)


@pytest.mark.parametrize("key", ["", " x", "a\r\nHost: b", "ü"])
def test_a_key_that_would_break_the_head_is_refused(key):
    with pytest.raises(ConfigError, match="--api-key"):
        parse_url("http://a", key)
