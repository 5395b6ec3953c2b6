"""The sampling kernel against the plain draw, golden tokens and frequencies."""

from __future__ import annotations

import math

import pytest
import torch

from minisgl import core
from minisgl.kernel.gpu.sampling import GREEDY_BELOW, make_workspace, sample
from minisgl.kernel.sampling import exponential_noise, sample_plainly
from tests.kernel.test_sampling import GOLDEN_LOGITS, GOLDEN_TOKENS, chi_square_limit, extreme_rows, random_rows, signed


def draw(logits, seeds, positions, temperatures=None, num_ids=None, block=1024):
    """Over a workspace whose unset memory is poisoned."""
    device = logits.device
    workspace = make_workspace(len(logits) + 3, logits.shape[1], device, block)
    workspace.values.fill_(float("nan"))
    workspace.ids.fill_(-7)
    if temperatures is None:
        temperatures = torch.ones(len(logits), device=device)
    tokens = sample(logits, temperatures, seeds, positions, num_ids or logits.shape[1], workspace)
    assert not workspace.num_done.any(), "ready for the next call"
    assert tokens.dtype == torch.int64
    return tokens


@pytest.fixture
def times(device):
    """A GPU draws as many times more rows; the interpreter takes 20 ms for a program."""
    return 40 if device.type == "cuda" else 1


def random_keys(num_rows, device):
    return torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=device), torch.randint(0, 40_960, (num_rows,), device=device)


def check(logits, tokens, seeds, positions):
    """The plain draw's token, or one whose score is as good but for rounding."""
    scores = exponential_noise(seeds, positions, logits.shape[1]).double().log() - logits.double()
    best = scores.amin(-1)
    own = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert bool((own - best <= 2e-5).all())
    gap = scores.topk(2, dim=-1, largest=False).values.diff(dim=-1).squeeze(-1)
    plain = sample_plainly(logits, seeds, positions)
    assert torch.equal(tokens[gap > 2e-5], plain[gap > 2e-5])
    assert int((gap > 2e-5).sum()) >= 0.9 * len(tokens) - 1


@pytest.mark.parametrize(("num_rows", "vocab_size", "block"), [(14, 150, 256), (6, 1003, 512), (3, 5000, 2048)])
def test_the_token_is_that_of_the_plain_draw(device, times, num_rows, vocab_size, block):
    num_rows *= times
    logits = random_rows(num_rows, vocab_size, seed=int(torch.randint(2**31, ()))).to(device)
    seeds, positions = random_keys(num_rows, device)
    check(logits, draw(logits, seeds, positions, block=block), seeds, positions)


@pytest.mark.parametrize("name", [name for name in extreme_rows() if name != "a single token"])
def test_the_token_is_that_of_the_plain_draw_where(device, name):
    rows = torch.randperm(40)[:3]
    logits = extreme_rows()[name][rows].to(device)
    seeds, positions = random_keys(len(logits), device)
    tokens = draw(logits, seeds, positions, block=512)
    if name == "all are equal and huge":  # fp64 scores of such logits would be coarse
        logits = torch.zeros_like(logits)
    if name == "one token is left":
        assert tokens.tolist() == (rows * 7).tolist()
    else:
        check(logits, tokens, seeds, positions)


def test_a_single_token_is_drawn(device):
    seeds, positions = random_keys(3, device)
    assert draw(torch.randn(3, 1, device=device), seeds, positions, block=4).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [(torch.float32, 2e-5), (torch.bfloat16, 0.3), (torch.float16, 1.0), (torch.bfloat16, 2.0), (torch.float32, 0.3)],
)
def test_temperature_and_type(device, times, dtype, temperature):
    num_rows = 4 * times
    logits = (torch.randn(num_rows, 300, device=device) * 5).to(dtype)
    seeds, positions = random_keys(num_rows, device)
    tokens = draw(logits, seeds, positions.int(), torch.full((num_rows,), temperature, device=device), block=256)
    check(logits.double() / float(torch.tensor(temperature)), tokens, seeds, positions)


@pytest.mark.parametrize(("seed", "expected"), GOLDEN_TOKENS.items())
def test_tokens_are_the_golden_ones(device, seed, expected):
    positions = torch.arange(len(expected), device=device)
    logits = torch.tensor(GOLDEN_LOGITS, device=device).expand(len(expected), -1).contiguous()
    assert draw(logits, torch.full_like(positions, signed(seed)), positions, block=64).tolist() == expected


@pytest.mark.parametrize("is_largest", [False, True])
def test_ends_of_the_noise(device, is_largest):
    """Of a million draws the least (about 1e-6) and the largest (about 14), against an ordinary one: what is better by 1e-4 wins."""
    positions = torch.arange(4000)
    noise = exponential_noise(torch.full_like(positions, 5), positions, 256)
    extremes = noise[:, 1:].amax(-1) if is_largest else -noise[:, 1:].amin(-1)
    rows = extremes.topk(3).indices
    tokens = 1 + (noise[rows, 1:].argmax(-1) if is_largest else noise[rows, 1:].argmin(-1))
    own, other = noise[rows, tokens], noise[rows, 0]
    assert bool((own > 11).all() if is_largest else (own < 1e-5).all())
    for shift in (-1e-4, 1e-4):
        logits = torch.full((3, 256), float("-inf"))
        logits[:, 0] = 0
        logits[torch.arange(3), tokens] = (own.double() / other.double()).log().float() + shift
        expected = tokens if shift > 0 else torch.zeros_like(tokens)
        drawn = draw(logits.to(device), torch.full((3,), 5, device=device), positions[rows].to(device), block=256)
        assert drawn.tolist() == expected.tolist()


def test_tokens_come_as_often_as_their_probability_says(device, times):
    num_draws = 40 * times
    row = torch.tensor([0.0, 1.0, float("-inf"), 0.5])
    logits = (row * 0.7).expand(num_draws, -1).contiguous().to(device)
    seeds, positions = torch.full((num_draws,), 7, device=device), torch.arange(num_draws, device=device)
    workspace = make_workspace(num_draws, 4, device, 16)
    tokens = sample(logits, torch.full((num_draws,), 0.7, device=device), seeds, positions, 4, workspace)
    counts = torch.bincount(tokens.cpu(), minlength=4).double()
    expected = row.double().softmax(-1) * num_draws
    assert counts[2] == 0
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < chi_square_limit(int(possible.sum()) - 1)


def test_greedy_begins_where_requests_say():
    assert GREEDY_BELOW == core.GREEDY_BELOW


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id(device):
    logits = torch.randint(-3, 4, (6, 300), device=device).bfloat16()
    logits[0] = 0
    logits[1, :200] = -1
    logits[1, 200:] = 5
    seeds, positions = random_keys(6, device)
    temperatures = torch.full((6,), GREEDY_BELOW / 2, device=device)
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert draw(logits, seeds, positions, temperatures, block=128).tolist() == first.tolist()
    tiny = torch.full((2, 64), 1.0, device=device)
    tiny[:, 40] += 2**-23
    assert draw(tiny, *random_keys(2, device), temperatures[:2], block=32).tolist() == [40, 40]


def test_neighbours_and_block_sizes_change_nothing(device):
    logits = random_rows(5, 250, seed=3).to(device)
    seeds, positions = random_keys(5, device)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 1.7, 0.3], device=device)
    together = draw(logits, seeds, positions, temperatures, block=128)
    for rows in (slice(0, 1), slice(2, 4)):
        assert torch.equal(draw(logits[rows], seeds[rows], positions[rows], temperatures[rows], block=128), together[rows])
    for block in (64, 1024):
        assert torch.equal(draw(logits, seeds, positions, temperatures, block=block), together)
    assert torch.equal(draw(logits[:2, :30], seeds[:2], positions[:2], block=4), draw(logits[:2, :30], seeds[:2], positions[:2], block=32))


def test_a_workspace_serves_again_and_again(device):
    logits, (seeds, positions) = torch.randn(3, 200, device=device), random_keys(3, device)
    workspace = make_workspace(8, 200, device, 128)
    first, second = (sample(logits, torch.ones(3, device=device), seeds, positions, 200, workspace) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:(invalid value encountered|All-NaN slice):RuntimeWarning")  # a GPU does not warn
def test_a_row_that_is_not_finite_gives_no_token(device):
    logits = torch.randn(9, 100, device=device)
    logits[1, 3] = float("nan")
    logits[2] = float("nan")
    logits[3, 99] = float("inf")
    logits[4] = float("-inf")
    logits[5, :99] = float("-inf")
    logits[6, 50] = -float("nan")
    logits[7, 98] = float("-inf")
    seeds, positions = random_keys(9, device)
    for temperature in (0.0, 1.0):
        tokens = draw(logits, seeds, positions, torch.full((9,), temperature, device=device), block=64).tolist()
        assert [token == -1 for token in tokens] == [row in (1, 2, 3, 4, 6) for row in range(9)]
        assert tokens[5] == 99


@pytest.mark.parametrize("num_ids", [1, 32, 63, 90])
def test_ids_beyond_the_tokenizer_are_never_taken(device, num_ids):
    """Nor do they matter: the padding holds the largest logits, and NaN. The rows are slices of wider ones."""
    wide = torch.randn(4, 140, device=device)
    wide[:2, num_ids:] = 1000
    wide[2:, num_ids:] = float("nan")
    seeds, positions = random_keys(4, device)
    temperatures = torch.tensor([0.0, 1.0], device=device).repeat(2)
    tokens = draw(wide[:, :96], seeds, positions, temperatures, num_ids, block=64)
    assert torch.equal(tokens, draw(wide[:, :num_ids].contiguous(), seeds, positions, temperatures, block=64))
    assert bool((tokens < num_ids).all())


def test_temperatures_and_seeds_by_slot(device):
    logits, (seeds, positions) = torch.randn(5, 64, device=device), random_keys(40, device)
    temperatures, slots = torch.rand(40, device=device).round() * 1.5, torch.tensor([30, 2, 39, 0, 7], device=device)
    workspace = make_workspace(8, 64, device, 32)
    expected = sample(logits, temperatures[slots], seeds[slots], positions[:5], 64, workspace)
    assert torch.equal(sample(logits, temperatures, seeds, positions[:5], 64, workspace, slots.int()), expected)


def test_a_whole_vocabulary(device):
    logits = (torch.randn(1, 151_936, device=device) * 3).bfloat16()
    seeds, positions = random_keys(1, device)
    workspace = make_workspace(1, 151_669, device, 16_384)
    tokens = sample(logits, torch.ones(1, device=device), seeds, positions, 151_669, workspace)
    scores = exponential_noise(seeds, positions, 151_669).double().log() - logits[:, :151_669].double()
    assert float(scores[0, tokens[0]] - scores.min()) < 2e-5
    assert math.isfinite(float(workspace.values.sum()))
