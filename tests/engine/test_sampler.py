"""The sampler: the order of its steps, what a slot remembers, who is left alone, and which ids can never be sampled."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minisgl.core import SamplingParams, SlotSetup
from minisgl.engine.sampler import Sampler
from minisgl.kernel.sampling import exponential_noise

VOCAB = 80
CPU = torch.device("cpu")


def setup(slot: int, params: SamplingParams, prompt=(1, 2, 3), output=(), end_ids=frozenset(), seed: int | None = None) -> SlotSetup:
    chosen = params.seed if seed is None else seed
    arrays = [np.array(tokens, dtype=np.int32) for tokens in (prompt, output)]
    return SlotSetup(slot, params, 1000 + slot if chosen is None else chosen, frozenset(end_ids), *arrays)


def make_sampler(*setups: SlotSetup, num_ids: int = VOCAB, num_slots: int = 64) -> Sampler:
    sampler = Sampler(num_slots, num_ids, CPU)
    sampler.set_up(setups)
    return sampler


def int32(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def draw(sampler: Sampler, logits: torch.Tensor, slots, positions) -> list[int]:
    return sampler.sample(logits, int32(slots), int32(positions)).tolist()


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=rng.choice([0.0, 1e-12, 0.3, 1.0, 2.0]),
        top_k=maybe(rng.randint(1, VOCAB), 0),
        top_p=maybe(rng.uniform(0.05, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.4), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-10, 10) for _ in range(5)}, {}),
        min_tokens=maybe(4, 0),
        seed=rng.getrandbits(64),
    )


def expected_token(row: torch.Tensor, own: SlotSetup, output: list[int]) -> int:
    """The order of the steps once more, with transformers' processors, for one row."""
    params, scores = own.params, row.clone()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(output) < params.min_tokens:
        scores[list(own.end_ids)] = float("-inf")
    said = torch.tensor([*own.prompt.tolist(), *output]).unsqueeze(0)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(said, scores.unsqueeze(0))[0]
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature < 1e-5:
        return int(scores.argmax())
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    probs = warpers(None, scores.unsqueeze(0))[0].softmax(-1)
    seed = own.seed - 2**64 if own.seed >= 2**63 else own.seed
    noise = exponential_noise(torch.tensor([seed]), torch.tensor([len(own.prompt) + len(output)]), len(row))[0]
    return int((noise / probs).argmin())


def test_tokens_follow_bias_ban_penalties_temperature_and_filters_in_this_order():
    """200 random requests in one batch, five tokens each: their noise is known, so every token is."""
    rng = random.Random(1)
    setups = [
        setup(slot, random_params(rng), [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))], end_ids=rng.sample(range(VOCAB), 3))
        for slot in range(200)
    ]
    sampler = make_sampler(*setups, num_slots=200)
    outputs: list[list[int]] = [[] for _ in setups]
    for step in range(5):
        logits = random_logits(200, seed=step)
        tokens = draw(sampler, logits, range(200), [len(own.prompt) + step for own in setups])
        for own, output, row, token in zip(setups, outputs, logits, tokens, strict=True):
            assert token == expected_token(row, own, output), f"slot {own.slot}, step {step}: {own.params}"
            output.append(token)


def test_a_retracted_request_goes_on_as_if_nothing_had_happened():
    rng = random.Random(2)
    for slot in range(20):
        own = setup(slot, random_params(rng), [rng.randrange(VOCAB) for _ in range(5)], end_ids=[3, 4])
        whole, cut, output = make_sampler(own), make_sampler(own), []
        for step in range(8):
            logits = random_logits(1, seed=step)
            if step == 4:  # another request has had the slot in between
                cut.set_up([setup(slot, SamplingParams(presence_penalty=1.0))])
                draw(cut, logits, [slot], [3])
                cut.set_up([setup(slot, own.params, own.prompt, output, own.end_ids)])
            tokens = [draw(sampler, logits, [slot], [5 + step])[0] for sampler in (whole, cut)]
            assert tokens[0] == tokens[1]
            output.append(tokens[0])


def test_neighbours_change_nothing():
    """Each request alone, and all together in any order: the same tokens, step by step."""
    rng = random.Random(3)
    setups = [setup(slot, random_params(rng), [rng.randrange(VOCAB) for _ in range(4)], end_ids=[7]) for slot in range(24)]
    logits = [random_logits(24, seed=step) for step in range(4)]
    together, alone = make_sampler(*setups), [make_sampler(own) for own in setups]
    for step in range(4):
        order = rng.sample(range(24), 24)
        tokens = dict(zip(order, draw(together, logits[step][order], order, [4 + step] * 24), strict=True))
        for slot in range(24):
            assert draw(alone[slot], logits[step][slot : slot + 1], [slot], [4 + step]) == [tokens[slot]]


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 9.9e-6])
def test_a_tiny_temperature_is_greedy_and_its_neighbours_are_unaffected(temperature):
    normal, greedy = SamplingParams(temperature=0.8, seed=5), SamplingParams()
    sampler = make_sampler(setup(0, normal), setup(1, SamplingParams(temperature=temperature, seed=9)), setup(2, greedy))
    undisturbed = make_sampler(setup(0, normal), setup(2, greedy))
    for step in range(50):
        logits = random_logits(3, seed=step) * 100
        tokens = draw(sampler, logits, [0, 1, 2], [3 + step] * 3)
        assert tokens[1:] == logits[1:].argmax(-1).tolist()
        assert tokens[::2] == draw(undisturbed, logits[::2], [0, 2], [3 + step] * 2)


def test_the_smallest_temperature_that_is_not_greedy_divides_nothing_to_nan():
    sampler = make_sampler(setup(0, SamplingParams(temperature=1e-5, seed=1, repetition_penalty=0.01)))
    for scale in (1e-3, 1.0, 1e4):
        logits = random_logits(1) * scale
        assert 0 <= draw(sampler, logits, [0], [3])[0] < VOCAB
    assert draw(sampler, torch.eye(VOCAB)[11:12] * 1e4, [0], [3]) == [11]


# ---- ids that cannot be sampled ---------------------------------------------------------------------------------------------------


PADDED = [
    SamplingParams(),
    SamplingParams(temperature=2.0, seed=1),
    SamplingParams(logit_bias={VOCAB - 1: 100.0, VOCAB + 5: 100.0, 2**31 - 1: 100.0}),
    SamplingParams(temperature=1.0, seed=2, top_k=3, logit_bias={VOCAB - 3: 100.0}),
    SamplingParams(temperature=1.0, seed=3, repetition_penalty=0.1, presence_penalty=-2.0, min_tokens=9),
]


@pytest.mark.parametrize("params", PADDED)
def test_ids_beyond_the_tokenizer_are_never_sampled(params):
    """The vocabulary is padded from id 70 on, and the padding has the largest logits; prompt and end ids may name it too."""
    num_ids = 70
    sampler = make_sampler(setup(0, params, prompt=[1, 75, 79], end_ids=[3, 75, 500]), num_ids=num_ids)
    for step in range(40):
        logits = random_logits(1, seed=step)
        logits[:, num_ids:] += 50
        assert draw(sampler, logits, [0], [3 + step])[0] < num_ids


def test_no_end_id_is_sampled_before_min_tokens_and_any_may_be_after():
    end_ids, logits = [5, 9, 30], torch.full((1, VOCAB), -5.0)
    logits[0, end_ids] = 20.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, min_tokens=3)
        sampler = make_sampler(setup(0, params, prompt=[1, 2], end_ids=end_ids))
        tokens = [draw(sampler, logits, [0], [position])[0] for position in range(2, 7)]
        assert not set(tokens[:3]) & set(end_ids)
        assert set(tokens[3:]) <= set(end_ids)


def test_min_tokens_without_any_end_id_bans_nothing():
    logits = random_logits(1)
    assert draw(make_sampler(setup(0, SamplingParams(min_tokens=3))), logits, [0], [3]) == logits.argmax(-1).tolist()


def test_min_tokens_goes_before_a_bias_that_asks_for_an_end_id():
    params = SamplingParams(min_tokens=2, logit_bias={5: 100.0})
    sampler = make_sampler(setup(0, params, end_ids=[5]))
    tokens = [draw(sampler, torch.zeros((1, VOCAB)), [0], [position])[0] for position in (3, 4, 5)]
    assert tokens == [0, 0, 5]


def test_a_bias_bans_and_forces():
    logits = random_logits(1)
    best = int(logits.argmax())
    assert draw(make_sampler(setup(0, SamplingParams(logit_bias={best: -100.0}))), logits, [0], [3]) != [best]
    forced = SamplingParams(temperature=1.0, seed=1, logit_bias={17: 100.0})
    assert draw(make_sampler(setup(0, forced)), logits, [0], [3]) == [17]


# ---- what it leaves alone -----------------------------------------------------------------------------------------------------------


def test_the_logits_stay_as_they_are():
    """Log probabilities are taken from them afterwards."""
    rng = random.Random(4)
    sampler = make_sampler(*(setup(slot, random_params(rng), end_ids=[1]) for slot in range(30)))
    logits = random_logits(30)
    before = logits.clone()
    draw(sampler, logits, range(30), [3] * 30)
    assert torch.equal(logits, before)


def test_a_slot_forgets_the_request_before():
    noisy = SamplingParams(temperature=1.5, seed=1, frequency_penalty=2.0, logit_bias={4: 50.0}, logprobs=3, min_tokens=50)
    sampler = make_sampler(setup(0, noisy, end_ids=[int(random_logits(1).argmax())]))
    draw(sampler, random_logits(1), [0], [3])
    assert sampler.num_top(int32([0])) == [3]
    sampler.set_up([setup(0, SamplingParams())])
    assert sampler.num_top(int32([0])) == [-1]
    assert draw(sampler, random_logits(1), [0], [3]) == random_logits(1).argmax(-1).tolist()
    fresh, penalised = make_sampler(), setup(0, SamplingParams(presence_penalty=2.0))
    for each in (sampler, fresh):
        each.set_up([penalised])
    for step in range(4):
        assert draw(sampler, random_logits(1, step), [0], [3 + step]) == draw(fresh, random_logits(1, step), [0], [3 + step])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_fp32(dtype):
    rng = random.Random(5)
    setups = [setup(slot, random_params(rng)) for slot in range(20)]
    logits = random_logits(20).to(dtype)
    halves, whole = (draw(make_sampler(*setups), each, range(20), [3] * 20) for each in (logits, logits.float()))
    assert halves == whole


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_all_64_bits_of_a_seed_count(seed):
    logits = torch.zeros((1, VOCAB))
    params = SamplingParams(temperature=1.0, seed=seed)
    tokens = [draw(make_sampler(setup(0, params)), logits, [0], [position])[0] for position in range(12)]
    noise = exponential_noise(torch.full((12,), seed - 2**64 if seed >= 2**63 else seed), torch.arange(12), VOCAB)
    assert tokens == noise.argmin(-1).tolist()
