"""Rotary position embeddings (arXiv 2104.09864) and the ways to stretch them: linear, dynamic, yarn (arXiv 2309.00071), llama3.

The angles of a position depend on that position alone, for every kind: K is cached and shared by prefix, so it must never depend on
how long some sequence grew later. For `dynamic` this is what transformers gives when a sequence is decoded token by token.

Letters: T tokens, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["RopeConfig", "RopeKind", "Rotary"]

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The numbers of one model's rotary embedding."""

    head_dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    """tokens the model was trained on before stretching; dynamic, yarn and llama3 need it"""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """multiplies cos and sin (yarn)"""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions"""


class Rotary:
    """cos and sin of given positions. Not a layer: it has no weights."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self._config = config
        self._inv_freq = _inverse_frequencies(config).to(device)
        """fp32 [D/2]"""
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def tabulate(self, num_positions: int, dtype: torch.dtype) -> None:
        """Compute positions 0 to num_positions - 1 once: a look-up is then one operation, which counts where steps are short."""
        self._tables = self.cos_sin(torch.arange(num_positions, device=self._inv_freq.device), dtype)

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions int64 [T] -> cos and sin [T, D/2], computed in fp32 and given in `dtype`."""
        if self._tables is not None:
            cos, sin = self._tables
            return cos[positions], sin[positions]
        inv_freq = self._dynamic(positions) if self._config.kind == "dynamic" else self._inv_freq
        angles = positions.float().unsqueeze(1) * inv_freq
        factor = self._config.attention_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _dynamic(self, positions: torch.Tensor) -> torch.Tensor:
        """fp32 [T, D/2]: the base grows with the position once it passes the trained context."""
        config = self._config
        length = (positions + 1).clamp(min=config.original_context).float()
        stretch = (config.factor * length / config.original_context) - (config.factor - 1)
        base = config.theta * stretch ** (config.head_dim / (config.head_dim - 2))
        return 1.0 / base.unsqueeze(1) ** _exponents(config.head_dim).to(positions.device)


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim


def _inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """fp32 [D/2] on the CPU."""
    plain = 1.0 / config.theta ** _exponents(config.head_dim)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(plain, config)
    if config.kind == "yarn":
        return _yarn(config)
    return plain


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    longest, shortest = (config.original_context / f for f in (config.low_freq_factor, config.high_freq_factor))
    share_kept = (config.original_context / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - share_kept) * plain / config.factor + share_kept * plain
    result = torch.where(wavelength > longest, plain / config.factor, blended)
    return torch.where(wavelength < shortest, plain, result)


def _yarn(config: RopeConfig) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, those that turn seldom are stretched, with a linear ramp between."""
    dim = config.head_dim

    def dimension_of(num_turns: float) -> float:
        return dim * math.log(config.original_context / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = config.theta ** _exponents(dim)
    # 1 - kept is not quite ramp: at position 40,000 one rounding of a frequency is 5e-5 of an angle, so transformers' order is kept
    return (1.0 / (config.factor * powers)) * (1 - kept) + (1.0 / powers) * kept
