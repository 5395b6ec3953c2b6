"""Sampling parameters are checked where they are made: every field, every kind of wrong value, with the field's name in the error."""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace

import msgspec
import pytest

from minisgl.core import SamplingParams, split_choices
from minisgl.errors import RequestError

NAN, INF = math.nan, math.inf
NO_NUMBERS = [NAN, INF, -INF, "1", None, True, False, [1.0], {}, 1j, 10**400]
NO_INTEGERS = [NAN, INF, 1.0, 1.5, "1", True, False, [1], {}]

WRONG = {
    "temperature": [*NO_NUMBERS, -1, -1e-9, 2.0001, 1e300],
    "top_p": [*NO_NUMBERS, 0, 0.0, -0.0, -0.1, 1.0001, 2],
    "min_p": [*NO_NUMBERS, -1e-9, 1.0001],
    "repetition_penalty": [*NO_NUMBERS, 0, -1, 1e-30, 0.0099, 10.1],
    "frequency_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "presence_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "top_k": [*NO_INTEGERS, None, -2, -5, 10**10, 10**5000],
    "seed": [*NO_INTEGERS, -1, 2**64, 10**5000],
    "min_tokens": [*NO_INTEGERS, None, -1, 2**31],
    "max_tokens": [*NO_INTEGERS, 0, -160, 2**31, 9999999999999999999999],
    "n": [*NO_INTEGERS, None, 0, -1, 17, 10**6],
    "logprobs": [*NO_INTEGERS, -1, 21],
    "prompt_logprobs": [*NO_INTEGERS, -1, 21],
    "stop": [None, 5, "", [""], ["a", ""], [1], [None], ["x" * 257], ["a"] * 17, {"a": 1}, {"a"}, b"a", "cut \ud83d", [["a"]], True],
    "stop_token_ids": [None, 5, "5", [-1], [1.0], [True], ["1"], [2**31], list(range(65)), {1}, [None]],
    "logit_bias": [
        *[None, [], [1], "1", 5, {"1": 1.0}, {1.0: 1.0}, {True: 1.0}, {-1: 1.0}, {2**31: 1.0}, {None: 1}],
        *[{1: value} for value in [*NO_NUMBERS, 100.1, -100.1]],
        dict.fromkeys(range(1025), 1.0),
    ],
    "ignore_eos": [None, 0, 1, "true", [], NAN],
    "skip_special_tokens": [None, 0, 1, "false", [], NAN],
}


def show(value: object) -> str:
    return f"{type(value).__name__}-{repr(value)[:20] if not isinstance(value, int) else value.bit_length()}"


def test_every_field_is_covered():
    assert set(WRONG) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=show)
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    error, message = caught.value, str(caught.value)
    assert error.param == name
    assert error.status == 400
    assert message.startswith(f"{name}: ")
    assert " found" in message
    assert any(word in message for word in ("allowed", "wanted", "each stop is", "at most", "send valid"))
    assert len(message) < 250
    message.encode()


RIGHT = {
    "temperature": [0, 1, 2, 1e-12, 5e-324],
    "top_p": [1e-300, 0.5, 1, 1.0],
    "min_p": [0, 1, 1.0],
    "repetition_penalty": [0.01, 1, 10],
    "frequency_penalty": [-2, 2.0],
    "presence_penalty": [-2.0, 2],
    "top_k": [0, 1, 2**31 - 1],
    "seed": [None, 0, 2**64 - 1],
    "min_tokens": [0, 2**31 - 1],
    "max_tokens": [None, 1, 2**31 - 1],
    "n": [1, 16],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "stop": [(), ("a",), ("x" * 256,), ("👨‍👩‍👧",)],
    "stop_token_ids": [(), (0, 2**31 - 1), tuple(range(64))],
    "logit_bias": [{}, {0: -100, 2**31 - 1: 100.0}, dict.fromkeys(range(1024), 1.0)],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values], ids=show)
def test_the_limits_themselves_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_every_field_has_right_values_too():
    assert set(RIGHT) == set(WRONG)


def test_spellings_are_made_one():
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_min_tokens_may_not_be_above_max_tokens():
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(RequestError, match=r"min_tokens: 6 found; max_tokens is 5") as caught:
        SamplingParams(min_tokens=6, max_tokens=5)
    assert caught.value.param == "min_tokens"


def test_the_bias_is_a_copy():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (1e-12, True), (9.9e-6, True), (1e-5, False), (1.0, False)])
def test_a_tiny_temperature_is_greedy(temperature, is_greedy):
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_parameters_travel_unchanged_and_are_checked_on_arrival():
    params = SamplingParams(
        temperature=0.5, seed=2**64 - 1, stop=["a", "b"], stop_token_ids=[1], logit_bias={5: -1.5}, n=3, logprobs=0, prompt_logprobs=2
    )
    frame = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(frame, type=SamplingParams) == params
    forged = msgspec.msgpack.encode({**msgspec.msgpack.decode(frame, strict=False), "repetition_penalty": 0})
    with pytest.raises(msgspec.ValidationError, match="repetition_penalty"):
        msgspec.msgpack.decode(forged, type=SamplingParams)


def test_choices_have_the_seeds_of_the_design():
    step = 0x9E3779B97F4A7C15
    choices = split_choices(SamplingParams(n=4, seed=2**64 - 1, temperature=0.5))
    assert [choice.seed for choice in choices] == [(2**64 - 1 + i * step) % 2**64 for i in range(4)]
    assert {(choice.n, choice.temperature) for choice in choices} == {(1, 0.5)}


def test_a_single_choice_is_the_request_itself_and_unseeded_ones_stay_unseeded():
    params = SamplingParams(seed=7)
    assert split_choices(params) == [params]
    assert [choice.seed for choice in split_choices(SamplingParams(n=3))] == [None] * 3


def test_an_object_that_only_looks_like_a_number_is_refused():
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=SimpleNamespace())
