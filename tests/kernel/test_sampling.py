"""Noise, filters, penalties and the draw: known answers, an independent twin in plain Python, transformers' processors, frequencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minisgl.kernel.sampling import (
    apply_penalties,
    exponential_noise,
    exponential_noise_at,
    filter_logits,
    philox_4x32,
    sample,
    sample_plainly,
)

# ---- noise ------------------------------------------------------------------------------------------------------------------------

KNOWN_ANSWERS = [  # Random123 1.14, kat_vectors: philox4x32 with 7 rounds; counter, key, result
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The twin: the paper's round, on Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(7):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right % 2**32, (left >> 32) ^ c3 ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def plain_noise(seed: int, position: int, token: int) -> float:
    """The twin of the mapping: key from the seed's halves, counter (token // 4, position, 0, 0), word token % 4, its top 24 bits."""
    word = plain_philox([token // 4, position, 0, 0], [seed % 2**32, seed >> 32])[token % 4]
    return float(np.float32(-math.log1p(-((word >> 8) + 0.5) / 2**24)))


def plain_sample(logits: list[float], seed: int, position: int) -> int:
    scores = [plain_noise(seed, position, token) / math.exp(logit) for token, logit in enumerate(logits)]
    return scores.index(min(scores))


def signed(seed: int) -> int:
    """64 bits as torch holds them."""
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, result):
    tensors = [[torch.tensor([word]) for word in words(text)] for text in (counter, key)]
    assert [int(word) for word in philox_4x32(*map(tuple, tensors))] == words(result)
    assert plain_philox(words(counter), words(key)) == words(result)


GOLDEN_NOISE = [  # seed, position, token, noise: what every kernel, on any device, must give
    (0, 0, 0, 0.4664872884750366),
    (0, 0, 1, 0.054324716329574585),
    (1, 0, 0, 3.0716335773468018),
    (42, 17, 4095, 0.45226433873176575),
    (2**64 - 1, 2**31 - 1, 151935, 0.13399508595466614),
    (0x9E3779B97F4A7C15, 1000, 3, 1.8540488481521606),
]


@pytest.mark.parametrize(("seed", "position", "token", "noise"), GOLDEN_NOISE)
def test_noise_is_the_golden_one(seed, position, token, noise):
    seeds, positions = torch.tensor([signed(seed)]), torch.tensor([position])
    assert plain_noise(seed, position, token) == noise
    assert exponential_noise_at(seeds, positions, torch.tensor([token])).item() == noise
    assert exponential_noise(seeds, positions, token + 1)[0, token].item() == noise


GOLDEN_LOGITS = [4 * math.sin(3 * token) for token in range(37)]
GOLDEN_TOKENS = {  # seed -> tokens drawn from GOLDEN_LOGITS at positions 0 to 11
    0: [32, 32, 7, 7, 13, 7, 32, 34, 32, 34, 7, 9],
    1: [34, 26, 7, 13, 5, 15, 26, 17, 28, 36, 15, 13],
    42: [3, 11, 34, 34, 11, 30, 13, 34, 13, 36, 28, 11],
    2**64 - 1: [32, 32, 9, 5, 36, 9, 15, 28, 36, 32, 28, 36],
}


@pytest.mark.parametrize(("seed", "tokens"), GOLDEN_TOKENS.items())
def test_tokens_are_the_golden_ones(seed, tokens):
    positions = torch.arange(len(tokens))
    logits = torch.tensor(GOLDEN_LOGITS).expand(len(tokens), -1)
    assert sample(logits, torch.full_like(positions, signed(seed)), positions).tolist() == tokens
    assert [plain_sample(GOLDEN_LOGITS, seed, position) for position in range(len(tokens))] == tokens


def test_noise_of_all_tokens_is_the_noise_of_each():
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (50,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (50,), generator=generator)
    table = exponential_noise(seeds, positions, 101)  # 101: the last block of four is cut
    rows, tokens = torch.meshgrid(torch.arange(50), torch.arange(101), indexing="ij")
    single = exponential_noise_at(seeds[rows.reshape(-1)], positions[rows.reshape(-1)], tokens.reshape(-1))
    assert torch.equal(table.reshape(-1), single)
    assert table.dtype == torch.float32
    assert 0 < float(table.min()) <= float(table.max()) < 18


def test_noise_depends_on_its_own_seed_position_and_token_only():
    seeds, positions = torch.tensor([5, 6, 7]), torch.tensor([10, 20, 30])
    table = exponential_noise(seeds, positions, 64)
    assert torch.equal(exponential_noise(seeds[1:2], positions[1:2], 64), table[1:2])
    assert torch.equal(exponential_noise(seeds, positions, 30), table[:, :30])
    for other in (exponential_noise(seeds + 1, positions, 64), exponential_noise(seeds, positions + 1, 64)):
        assert not (other == table).any(dim=1).all()
        assert float((other == table).float().mean()) < 0.01


def test_blocks_of_four_and_neighbouring_seeds_are_independent():
    """Correlation of noise between the four words of a block, neighbouring tokens, positions, seeds and choices of one request."""
    step = signed(0x9E3779B97F4A7C15)
    tables = [exponential_noise(torch.full((500,), seed), torch.arange(500), 200) for seed in (1, 2, 1 + step)]
    table = tables[0]
    pairs = [(table[:, word::4], table[:, other::4]) for word in range(4) for other in range(word)]
    pairs += [(table[:, 4:], table[:, :-4]), (table[1:], table[:-1]), (table, tables[1]), (table, tables[2])]
    for left, right in pairs:
        both = torch.stack((left.reshape(-1), right.reshape(-1))).double()
        assert abs(float(torch.corrcoef(both)[0, 1])) < 4.5 / math.sqrt(both.shape[1])
    assert float(table.mean()) == pytest.approx(1, abs=0.02)
    assert float(table.var()) == pytest.approx(1, abs=0.05)


# ---- the draw ---------------------------------------------------------------------------------------------------------------------


def random_rows(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Logits of all kinds: flat to peaked."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (torch.rand((num_rows, 1), generator=generator) * 4 - 2)
    return torch.randn((num_rows, vocab_size), generator=generator) * scale


def extreme_rows() -> dict[str, torch.Tensor]:
    base = random_rows(40, 300, seed=9)
    one_hot = torch.full_like(base, float("-inf"))
    one_hot[torch.arange(40), torch.arange(40) * 7] = 3.0
    half = base.clone()
    half[:, ::2] = float("-inf")
    dominant = base.clone()
    dominant[:, 123] += 200
    return {
        "one token is left": one_hot,
        "all are equal": torch.zeros_like(base),
        "all are equal and huge": torch.full_like(base, 3e4),
        "half are excluded": half,
        "one is almost certain": dominant,
        "temperature 1e-5": base / 1e-5,
        "temperature 2": base / 2,
        "temperature 1e6": base / 1e6,
        "only denormal probabilities beside one": torch.cat((torch.zeros(40, 1), base.clamp(-1, 1) - 95), dim=1),
        "fewer tokens than the likely ones": base[:, :5],
        "a single token": base[:, :1],
    }


def check_against_plain(logits: torch.Tensor, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(logits),), generator=generator)
    positions = torch.randint(0, 40_960, (len(logits),), generator=generator)
    tokens = sample(logits, seeds, positions)
    assert tokens.tolist() == sample_plainly(logits, seeds, positions).tolist()
    assert bool((logits.gather(1, tokens.unsqueeze(1)) > float("-inf")).all())
    return tokens


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(4000, 150), (300, 4096)])
def test_the_pruned_draw_is_the_plain_one(num_rows, vocab_size):
    check_against_plain(random_rows(num_rows, vocab_size))


@pytest.mark.parametrize("name", extreme_rows())
def test_the_pruned_draw_is_the_plain_one_where(name):
    for seed in range(3):
        check_against_plain(extreme_rows()[name], seed)


def test_the_only_token_left_is_drawn():
    assert check_against_plain(extreme_rows()["one token is left"]).tolist() == [row * 7 for row in range(40)]


def test_equal_scores_go_to_the_lowest_id(monkeypatch):
    monkeypatch.setattr("minisgl.kernel.sampling.exponential_noise_at", lambda seeds, *_: torch.ones(len(seeds)))
    logits = torch.zeros((2, 200))
    logits[1, :150] = -1.0
    zero = torch.zeros(2, dtype=torch.int64)
    assert sample(logits, zero, zero).tolist() == [0, 150]


def chi_square_limit(degrees: int) -> float:
    """The value that a right draw exceeds once in about 100,000 times (Wilson and Hilferty)."""
    z = 4.26
    return float(degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3)


@pytest.mark.parametrize("by", ["position", "seed"])
def test_tokens_come_as_often_as_their_probability_says(by):
    num_draws = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -2.0, 1.5, float("-inf"), 0.0, -0.5])
    moving, fixed = torch.arange(num_draws), torch.full((num_draws,), 7)
    seeds, positions = (fixed, moving) if by == "position" else (moving, fixed)
    tokens = sample(logits.expand(num_draws, -1), seeds, positions)
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    expected = logits.double().softmax(-1) * num_draws
    assert counts[7] == 0
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < chi_square_limit(int(possible.sum()) - 1)


def test_following_tokens_are_independent():
    tokens = sample(torch.zeros((20_000, 8)), torch.full((20_000,), 11), torch.arange(20_000))
    pairs = torch.bincount(tokens[1:] * 8 + tokens[:-1], minlength=64).double()
    expected = (len(tokens) - 1) / 64
    assert float(((pairs - expected) ** 2 / expected).sum()) < chi_square_limit(63)


# ---- filters and penalties ----------------------------------------------------------------------------------------------------------


def kept_by_transformers(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, row.unsqueeze(0))[0]


def random_settings(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """top-k, top-p, min-p, each off in some rows."""
    generator = torch.Generator().manual_seed(4)
    choice = torch.rand((3, num_rows), generator=generator)
    top_k = torch.where(choice[0] < 0.4, 0, torch.randint(1, 150, (num_rows,), generator=generator))
    top_p = torch.where(choice[1] < 0.4, 1.0, torch.rand(num_rows, generator=generator).clamp(1e-3, 0.999))
    min_p = torch.where(choice[2] < 0.4, 0.0, torch.rand(num_rows, generator=generator) ** 3)
    return top_k, top_p, min_p


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_filters_keep_what_transformers_keeps_on_1000_rows(dtype):
    """In fp64 exactly; in fp32 a token may differ whose place is within the rounding of a sum of probabilities."""
    logits = random_rows(1000, 200, seed=5).to(dtype)
    top_k, top_p, min_p = random_settings(1000)
    ours = filter_logits(logits, top_k, top_p.to(dtype), min_p.to(dtype))
    num_differing = 0
    for row in range(1000):
        theirs = kept_by_transformers(logits[row], int(top_k[row]), float(top_p[row].to(dtype)), float(min_p[row].to(dtype)))
        assert torch.equal(ours[row][ours[row] > float("-inf")], logits[row][ours[row] > float("-inf")])
        if not torch.equal(ours[row], theirs):
            num_differing += 1
            assert dtype == torch.float32
            assert float((ours[row].softmax(-1) - theirs.softmax(-1)).abs().sum()) < 0.05
            assert int(((ours[row] > float("-inf")) ^ (theirs > float("-inf"))).sum()) <= 2
    assert num_differing <= (0 if dtype == torch.float64 else 10)


def test_every_row_has_its_own_filter():
    logits = random_rows(64, 100, seed=6)
    top_k, top_p, min_p = random_settings(64)
    together = filter_logits(logits, top_k, top_p, min_p)
    alone = [filter_logits(logits[row : row + 1], top_k[row : row + 1], top_p[row : row + 1], min_p[row : row + 1]) for row in range(64)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(1, 1.0, 0.0), (0, 1e-30, 0.0), (0, 1.0, 1.0), (1, 1e-30, 1.0)])
def test_the_strictest_filters_leave_the_likeliest_token(top_k, top_p, min_p):
    logits = random_rows(50, 100, seed=7)
    kept = filter_logits(logits, torch.full((50,), top_k), torch.full((50,), top_p), torch.full((50,), min_p))
    assert (kept > float("-inf")).sum(-1).tolist() == [1] * 50
    assert torch.equal(kept.argmax(-1), logits.argmax(-1))


def test_filters_that_are_off_change_nothing():
    logits = random_rows(20, 100)
    kept = filter_logits(logits, torch.zeros(20, dtype=torch.int64), torch.ones(20), torch.zeros(20))
    assert torch.equal(kept, logits)


def test_a_top_k_above_the_vocabulary_keeps_all():
    logits = random_rows(3, 10)
    assert torch.equal(filter_logits(logits, torch.tensor([10, 11, 2**31 - 1]), torch.ones(3), torch.zeros(3)), logits)


def plain_penalties(row: list[float], prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float):
    result = []
    for token, logit in enumerate(row):
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition  # noqa: PLW2901 - what the token has become so far
        result.append(logit - frequency * output.count(token) - presence * (token in output))
    return result


def test_penalties_are_those_of_transformers_and_of_a_plain_twin_on_1000_rows():
    num_rows, vocab_size = 1000, 60
    generator = torch.Generator().manual_seed(8)
    logits = random_rows(num_rows, vocab_size, seed=8)
    prompts = torch.randint(0, vocab_size, (num_rows, 12), generator=generator)
    outputs = torch.randint(0, vocab_size, (num_rows, 20), generator=generator)
    repetition = torch.rand(num_rows, generator=generator) * 2 + 0.05
    frequency, presence = (torch.rand(num_rows, generator=generator) * 4 - 2 for _ in range(2))
    mask = torch.zeros((num_rows, vocab_size), dtype=torch.bool).scatter(1, prompts, True)
    counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32).scatter_add(1, outputs, torch.ones_like(outputs, dtype=torch.int32))
    ours = apply_penalties(logits, mask, counts, repetition, frequency, presence)
    for row in range(0, num_rows):
        numbers = (float(repetition[row]), float(frequency[row]), float(presence[row]))
        twin = torch.tensor(plain_penalties(logits[row].tolist(), prompts[row].tolist(), outputs[row].tolist(), *numbers))
        torch.testing.assert_close(ours[row], twin, rtol=1e-5, atol=1e-5)
    zero = torch.zeros(num_rows)
    ours = apply_penalties(logits, mask, counts, repetition, zero, zero)
    for row in range(num_rows):
        said = torch.cat((prompts[row], outputs[row])).unsqueeze(0)
        theirs = RepetitionPenaltyLogitsProcessor(float(repetition[row]))(said, logits[row : row + 1])
        torch.testing.assert_close(ours[row], theirs[0], rtol=1e-6, atol=0)
