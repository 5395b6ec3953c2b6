"""What the load client sends: drawn from the seed, within its bounds, in the shape that was asked for."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import msgspec
import pytest

from minisgl.bench.serve_http import parse_url
from minisgl.bench.serve_plan import Form, Options, Plan, Scale, make_lanes, make_text, parse_range
from minisgl.errors import ConfigError

TARGET = parse_url("http://127.0.0.1:1")
FORM = Form("chat", "m", 0.6)


def turns(lanes):
    return [turn for lane in lanes for conversation in lane.conversations for turn in conversation.turns]


def test_the_defaults_are_the_workload_by_which_servers_are_compared():
    lanes = make_lanes(Options(), Scale())
    assert (len(lanes), {len(lane.conversations) for lane in lanes}) == (64, {8})
    assert [lane.start for lane in lanes] == pytest.approx([5 * place / 64 for place in range(64)])
    words, answers = [turn.num_words for turn in turns(lanes)], [turn.max_tokens for turn in turns(lanes)]
    assert (min(words) >= 128, max(words) <= 640, min(answers) >= 64, max(answers) <= 448) == (True,) * 4
    assert statistics.mean(words) == pytest.approx(384, rel=0.06)
    assert statistics.mean(answers) == pytest.approx(256, rel=0.06)
    assert len(make_lanes(Options(streams=1), Scale())[0].conversations) == 20
    assert Options(streams=1).num_requests == 20


def test_only_the_seed_decides_the_numbers():
    lanes = make_lanes(Options(), Scale())
    assert make_lanes(Options(), Scale()) == lanes
    assert turns(make_lanes(Options(rate=3, streams=64, temperature=0), Scale())) == turns(lanes)
    assert turns(make_lanes(Options(seed=1), Scale())) != turns(lanes)


def test_requests_at_a_rate_come_at_random_moments():
    options = Options(rate=50, streams=100, requests_per_stream=20)
    lanes = make_lanes(options, Scale())
    starts = [lane.start for lane in lanes]
    gaps = [after - before for before, after in zip([0.0, *starts], starts, strict=False)]
    assert (len(lanes), {len(lane.conversations) for lane in lanes}) == (2000, {1})
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.15)  # of an exponential distribution: its mean
    assert starts == [lane.start for lane in make_lanes(options, Scale())]
    assert starts != [lane.start for lane in make_lanes(replace(options, seed=1), Scale())]


def test_words_follow_from_tokens():
    scale = Scale(tokens_per_word=2.5, tokens_around=20)
    assert (scale.num_words(120), scale.num_words(5), scale.num_words_inside(50), scale.num_words_inside(0)) == (40, 1, 20, 0)


def test_texts_share_only_the_prefix_that_they_shall_share():
    lanes = make_lanes(Options(streams=3, requests_per_stream=2, turns=2), Scale())
    plan = Plan(TARGET, FORM, 1.0, lanes, "0/0", 10)
    conversations = [conversation for lane in lanes for conversation in lane.conversations]
    first = [plan.text(each, 0).split() for each in conversations]
    assert len({tuple(words[:10]) for words in first}) == 1
    assert len({tuple(words[10:18]) for words in first}) == 6
    assert [len(words) - 10 for words in first] == [each.turns[0].num_words for each in conversations]
    later = [plan.text(each, 1).split() for each in conversations]
    assert [len(words) for words in later] == [each.turns[1].num_words for each in conversations]
    assert len({tuple(words[:8]) for words in [*first, *later]}) == 7
    other_run = replace(plan, text_seed="0/1")
    assert other_run.text(conversations[0], 0).split()[:10] != first[0][:10]
    assert make_text("a", 5) == make_text("a", 5) != make_text("b", 5)


def body(request: bytes) -> dict:
    return json.loads(request.partition(b"\r\n\r\n")[2])


def test_a_request_resends_what_was_said():
    request = FORM.request(TARGET, ["Hello", "Hi.", "Who?"], 9)
    assert request.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    roles = [(message["role"], message["content"]) for message in body(request).pop("messages")]
    assert roles == [("user", "Hello"), ("assistant", "Hi."), ("user", "Who?")]
    rest = {
        "model": "m",
        "temperature": 0.6,
        "stream": True,
        "max_tokens": 9,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    assert {name: value for name, value in body(request).items() if name != "messages"} == rest
    bare = Form("completions", "m", 0.0, "max_completion_tokens", {}).request(TARGET, ["Hello", "Hi."], 9)
    assert bare.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert body(bare) == {"model": "m", "temperature": 0.0, "stream": True, "max_completion_tokens": 9, "prompt": "Hello\nHi."}


def test_a_plan_reaches_another_process_as_it_is():
    plan = Plan(TARGET, FORM, 1.0, make_lanes(Options(streams=2), Scale()), "0/0", 10)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(("text", "found"), [("3:7", (3, 7)), ("5", (5, 5)), ("5:", (5, 5))])
def test_a_range_is_two_numbers_or_one(text, found):
    assert parse_range("--x", text) == found


@pytest.mark.parametrize("text", ["", "a", "1:b", "1:2:3", ":5"])
def test_a_range_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--x"):
        parse_range("--x", text)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"streams": 0}, "--streams"),
        ({"requests_per_stream": -1}, "--requests-per-stream"),
        ({"prompt_tokens": (0, 5)}, "--prompt-tokens"),
        ({"answer_tokens": (6, 5)}, "--answer-tokens"),
        ({"ramp_up": -1.0}, "--ramp-up"),
        ({"ramp_up": float("nan")}, "--ramp-up"),
        ({"rate": float("inf")}, "--rate"),
        ({"rate": 2.0, "ramp_up": 1.0}, "--ramp-up and --rate"),
        ({"turns": 0}, "--turns"),
        ({"shared_prefix_tokens": -1}, "--shared-prefix-tokens"),
        ({"temperature": 3.0}, "--temperature"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_a_load_that_cannot_be_made_is_refused_by_its_flag(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        Options(**settings)
