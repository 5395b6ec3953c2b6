"""Plain-torch twins of the sampling kernels: logits to tokens, with noise that is a pure function of (seed, position, token).

Nothing here draws from a random stream: a neighbour in the batch, a chunk, a retraction or another rank changes no noise. Knows tensors
only. Called by the engine's sampler, and the oracle of faster kernels.

Letters: R rows, V vocabulary, N (row, token) pairs.
"""

from __future__ import annotations

import torch

__all__ = ["apply_penalties", "exponential_noise", "filter_logits", "philox_4x32", "sample"]

NUM_ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
LEAST_NOISE = 2.0**-25
"""No token's noise is smaller."""
NUM_LIKELY = 64

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox_4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox-4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Words are int64 tensors holding 32-bit unsigned values, broadcast against each other; four words of the same kind come back.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # the product wraps modulo 2**64, which leaves both halves right
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((second >> 32) & MASK) ^ c1 ^ k0, second & MASK, ((first >> 32) & MASK) ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def _exponential(bits: torch.Tensor) -> torch.Tensor:
    """32 random bits (int64) -> exponentially distributed fp32: -log(1 - u), u from the top 24 bits, never 0 or 1."""
    uniform = ((bits >> 8).to(torch.float64) + 0.5) * 2.0**-24
    return -torch.log1p(-uniform).to(torch.float32)


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise of every token. seeds int64 [R] (the 64 bits), positions int64 [R] (index in the sequence) -> fp32 [R, V]."""
    blocks = torch.arange(-(-vocab_size // 4), device=seeds.device)
    zero = torch.zeros_like(blocks)
    words = philox_4x32((blocks, positions.unsqueeze(1), zero, zero), (seeds.unsqueeze(1) & MASK, (seeds.unsqueeze(1) >> 32) & MASK))
    bits = torch.stack([word.expand(len(seeds), len(blocks)) for word in words], dim=-1)
    return _exponential(bits.reshape(len(seeds), -1)[:, :vocab_size])


def exponential_noise_at(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Noise of single tokens: seeds, positions, tokens int64 [N] -> fp32 [N], equal to `exponential_noise` there."""
    zero = torch.zeros_like(tokens)
    words = philox_4x32((tokens // 4, positions, zero, zero), (seeds & MASK, (seeds >> 32) & MASK))
    bits = torch.stack(words, dim=-1).gather(1, (tokens % 4).unsqueeze(1)).squeeze(1)
    return _exponential(bits)


def apply_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Penalise what has been said. logits fp32 [R, V]; prompt_mask bool and output_counts int32 [R, V]; penalties fp32 [R].

    Repetition (arXiv 1909.05858) counts tokens of prompt and output: positive logits are divided by it, negative ones multiplied.
    Frequency times the count in the output, and presence once for a token in the output, are subtracted.
    """
    is_output = output_counts > 0
    factor = repetition.unsqueeze(1)
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(prompt_mask | is_output, penalised, logits)
    return logits - frequency.unsqueeze(1) * output_counts - presence.unsqueeze(1) * is_output


def filter_logits(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest tokens of each row, others become -inf: first top-k, then top-p (arXiv 1904.09751), then min-p (arXiv 2407.01082).

    logits fp32 [R, V], scaled by temperature already; top_k int64 [R], 0 = off, tokens equal to the k-th stay; top_p fp32 [R] in (0, 1],
    the token that reaches it stays, the lowest ids first among equals; min_p fp32 [R], relative to the likeliest token. At least one
    token is always left.
    """
    largest_k = int(top_k.max())
    if largest_k > 0:
        largest_k = min(largest_k, logits.shape[1])
        values = logits.topk(largest_k, dim=-1).values
        last = values.gather(1, (top_k.clamp(1, largest_k) - 1).unsqueeze(1))
        logits = logits.masked_fill((logits < last) & (top_k > 0).unsqueeze(1), float("-inf"))
    if bool((top_p < 1).any()):
        logits = _filter_top_p(logits, top_p)
    if bool((min_p > 0).any()):
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < min_p.unsqueeze(1) * probs.amax(-1, keepdim=True), float("-inf"))
    return logits


def _filter_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = values.softmax(-1)
    is_beyond = probs.cumsum(-1) - probs >= top_p.unsqueeze(1)
    is_beyond[:, 0] = False
    is_beyond &= (top_p < 1).unsqueeze(1)
    return logits.masked_fill(torch.zeros_like(is_beyond).scatter(1, order, is_beyond), float("-inf"))


def sample(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row, distributed as softmax(logits): argmin of noise / probability, the lowest id among equals.

    logits fp32 [R, V] (-inf is never taken); seeds, positions int64 [R] -> int64 [R].
    """
    probs = logits.softmax(-1)
    # A token can only win if its probability is above (least noise) / (best score so far): the likeliest few give that score.
    likely = probs.topk(min(NUM_LIKELY, probs.shape[1]), dim=-1)
    num_likely = likely.indices.shape[1]
    noise = exponential_noise_at(
        seeds.repeat_interleave(num_likely), positions.repeat_interleave(num_likely), likely.indices.reshape(-1)
    ).view_as(likely.values)
    best = (noise / likely.values).amin(-1, keepdim=True)
    rows, tokens = torch.nonzero((probs > 0) & (probs * best >= LEAST_NOISE / 2), as_tuple=True)
    scores = torch.full_like(probs, float("inf"))
    scores[rows, tokens] = exponential_noise_at(seeds[rows], positions[rows], tokens) / probs[rows, tokens]
    return scores.argmin(-1)


def sample_plainly(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The same, with the noise of every token: what `sample` must equal."""
    return (exponential_noise(seeds, positions, logits.shape[1]) / logits.softmax(-1)).argmin(-1)
