"""The sampler's state on the device, with its kernels: the tokens of the plain sampler, step by step, whatever requests want."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.engine.device_sampler import ADJUSTED, FILTERED, SIMPLE, DeviceSampler
from minisgl.engine.sampler import Sampler
from tests.engine.test_sampler import CPU, int32, random_logits, random_params, setup

VOCAB = 80


class Both:
    """The same requests in the plain sampler and in the one under test, whose logits are padded by ids that nobody knows."""

    def __init__(self, device, num_slots):
        self.device = device
        self.plain = Sampler(num_slots, VOCAB, CPU)
        self.tested = DeviceSampler(num_slots, VOCAB, device)

    def set_up(self, setups):
        self.plain.set_up(setups)
        self.tested.set_up(setups)

    def draw(self, logits, slots, positions):
        slots, positions = int32(slots), int32(positions)
        expected = self.plain.sample(logits, slots, positions).tolist()
        padded = torch.cat((logits, torch.full((len(logits), 16), 1000.0, dtype=logits.dtype)), dim=1).to(self.device)
        before = padded.clone()
        there = [torch.from_numpy(array).to(self.device) for array in (slots, positions)]
        tokens = self.tested.sample(padded, *there)
        if kind := self.tested.kind(slots):
            self.tested.resample(tokens, padded, *there, kind)
        assert torch.equal(padded.nan_to_num(nan=5.0), before.nan_to_num(nan=5.0)), "log probabilities are taken from them afterwards"
        return tokens.tolist(), expected


def test_tokens_are_those_of_the_plain_sampler(device):
    """Random requests in one batch, several tokens each: every parameter, output that was there before, ids beyond the tokenizer."""
    rng, num_slots = random.Random(torch.randint(2**31, ()).item()), 100 if device.type == "cuda" else 6
    setups = [
        setup(
            slot,
            random_params(rng),
            [rng.randrange(VOCAB + 9) for _ in range(rng.randint(1, 30))],
            [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))],
            end_ids=[*rng.sample(range(VOCAB), 3), VOCAB + 2],
        )
        for slot in range(num_slots)
    ]
    both = Both(device, num_slots)
    both.set_up(setups)
    lengths = [len(own.prompt) + len(own.output) for own in setups]
    for step in range(2):
        order = rng.sample(range(num_slots), num_slots)
        found, expected = both.draw(random_logits(num_slots), order, [lengths[slot] + step for slot in order])
        wrong = [setups[slot] for slot, mine, theirs in zip(order, found, expected, strict=True) if mine != theirs]
        assert not wrong


ONE_AT_A_TIME = {
    "top-k": ({"temperature": 1.5, "top_k": 4, "seed": 1}, FILTERED),
    "top-p": ({"temperature": 1.5, "top_p": 0.6, "seed": 2}, FILTERED),
    "min-p": ({"temperature": 2.0, "min_p": 0.2, "seed": 3}, FILTERED),
    "greedy with filters": ({"top_k": 3, "top_p": 0.5}, SIMPLE),
    "repetition": ({"repetition_penalty": 1.8}, ADJUSTED),
    "frequency": ({"temperature": 0.5, "frequency_penalty": 1.5, "seed": 4}, ADJUSTED),
    "presence": ({"presence_penalty": 2.0}, ADJUSTED),
    "bias": ({"logit_bias": {7: 100.0, 8: -3.0, VOCAB + 3: 5.0}}, ADJUSTED),
    "bias and penalties": ({"logit_bias": {7: 20.0, 8: 19.0, 9: 18.5}, "frequency_penalty": 0.7, "repetition_penalty": 1.1}, ADJUSTED),
    "min_tokens": ({"min_tokens": 3}, ADJUSTED),
}


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_one_wish_alone_and_beside_a_simple_request(device, name):
    settings, kind = ONE_AT_A_TIME[name]
    best = int(random_logits(1)[0].argmax())
    own = setup(2, SamplingParams(**settings), [1, best, 3], [5, 5], end_ids=[best])
    both = Both(device, 4)
    both.set_up([own, setup(0, SamplingParams(temperature=1.0, seed=9))])
    assert (both.tested.kind(int32([2])), both.tested.kind(int32([0])), both.tested.kind(int32([]))) == (kind, SIMPLE, SIMPLE)
    for step in range(3):
        found, expected = both.draw(random_logits(1).repeat(2, 1), [0, 2], [3 + step, 5 + step])
        assert found == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision_logits_are_adjusted_in_fp32(device, dtype):
    rng = random.Random(5)
    both = Both(device, 5)
    both.set_up([setup(slot, random_params(rng), end_ids=[3]) for slot in range(5)])
    found, expected = both.draw(random_logits(5).to(dtype), range(5), [3] * 5)
    assert found == expected


def test_a_slot_forgets_the_request_before_and_a_retracted_one_goes_on(device):
    rng = random.Random(6)
    params = SamplingParams(temperature=0.9, seed=8, frequency_penalty=1.5, logit_bias={4: 5.0}, min_tokens=50, top_k=30)
    both, output = Both(device, 2), []
    both.set_up([setup(1, params, [1, 2], end_ids=[6])])
    for step in range(4):
        if step == 2:  # others have had the slot in between
            for other in (SamplingParams(), random_params(rng), SamplingParams(presence_penalty=1.0)):
                both.set_up([setup(1, other, [7, 7, 9], end_ids=[5])])
                found, expected = both.draw(random_logits(1, 20), [1], [3])
                assert found == expected
            both.set_up([setup(1, params, [1, 2], output, end_ids=[6])])
        found, expected = both.draw(random_logits(1, step), [1], [2 + step])
        assert found == expected
        output += found


@pytest.mark.filterwarnings("ignore:(invalid value encountered|All-NaN slice):RuntimeWarning")  # a GPU does not warn
def test_a_row_that_is_not_finite_gives_no_token(device):
    logits = random_logits(4)
    logits[0, 3], logits[1], logits[2, 5] = float("nan"), float("-inf"), float("inf")
    both = Both(device, 4)
    params = SamplingParams(temperature=1.0, seed=1, top_k=5, top_p=0.9, presence_penalty=1.0, logit_bias={5: -100.0, 3: 1.0})
    both.set_up([setup(slot, params) for slot in range(4)])
    found, expected = both.draw(logits, range(4), [3] * 4)
    assert found == expected
    assert found[:3] == [-1, -1, -1]


def test_as_many_biases_and_as_long_a_prompt_as_are_allowed(device):
    num_ids = 2000
    params = SamplingParams(logit_bias={token: float(np.sin(token)) * 50 for token in range(300, 1324)}, presence_penalty=2.0)
    tested, plain = DeviceSampler(1, num_ids, device), Sampler(1, num_ids, CPU)
    own = setup(0, params, list(range(500, 2000)) * 2, [3, 3], end_ids=[1])
    tested.set_up([own])
    plain.set_up([own])
    slots, positions = int32([0]), int32([3002])
    for step in range(2):
        logits = random_logits(1, step, num_ids)
        there = [torch.from_numpy(array).to(device) for array in (slots, positions)]
        tokens = tested.sample(logits.to(device), *there)
        tested.resample(tokens, logits.to(device), *there, tested.kind(slots))
        assert tokens.tolist() == plain.sample(logits, slots, positions).tolist()
