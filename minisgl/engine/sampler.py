"""Logits to tokens for the slots of one engine: keeps each slot's sampling parameters and, beside the logits, what it has said.

The state of a slot begins with its `SlotSetup` and follows the tokens that are sampled here: the host learns them a step later and is
not asked. Knows no requests. Called by the engine.

Letters: S sampled rows, R rows of them that are not plain greedy, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from minisgl.core import Int32Array, SamplingParams, SlotSetup
from minisgl.kernel.sampling import apply_penalties, filter_logits, sample
from minisgl.kernel.staging import Uploader

if TYPE_CHECKING:
    from minisgl.engine.device_sampler import DeviceSampler

__all__ = ["Sampler"]

NO_TOKEN = -1
COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


class Sampler:
    """Sampling state of `num_slots` slots. Ids of `num_ids` and above (a padded vocabulary) are never sampled."""

    def __init__(self, num_slots: int, num_ids: int, device: torch.device) -> None:
        self._num_ids = num_ids
        self._device = device
        self._upload = Uploader(device)
        self._is_plain = np.ones(num_slots, dtype=np.bool_)
        """[slots] greedy with nothing added: argmax will do"""
        self._is_penalised = np.zeros(num_slots, dtype=np.bool_)
        self._wants_logprobs = np.zeros(num_slots, dtype=np.bool_)
        self._numbers = np.zeros((num_slots, len(COLUMNS)), dtype=np.float32)
        """[slots, COLUMNS]"""
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._seeds = np.zeros(num_slots, dtype=np.int64)
        self._setups: list[SlotSetup | None] = [None] * num_slots
        self._said: tuple[torch.Tensor, torch.Tensor] | None = None
        """prompt mask bool and output counts int32, [slots, V] each; made when the first request wants a penalty"""
        self._on_device: DeviceSampler | None = None
        if device.type == "cuda":
            from minisgl.engine.device_sampler import DeviceSampler

            self._on_device = DeviceSampler(num_slots, num_ids, device)

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """Begin slots anew."""
        for setup in setups:
            params, slot = setup.params, setup.slot
            self._setups[slot] = setup
            self._is_plain[slot] = is_plain(params)
            self._is_penalised[slot] = is_penalised(params)
            self._wants_logprobs[slot] = params.logprobs is not None
            self._numbers[slot] = [getattr(params, name) for name in COLUMNS]
            self._top_k[slot] = min(params.top_k, self._num_ids)
            self._seeds[slot] = np.uint64(setup.seed).astype(np.int64)
            if self._is_penalised[slot] and self._on_device is None:
                self._count(setup)
        if self._on_device is not None:
            self._on_device.set_up(setups)

    def num_top(self, slots: Int32Array) -> list[int]:
        """[S] likeliest tokens whose log probabilities each slot wants, -1 where it wants none."""
        if not self._wants_logprobs[slots].any():
            return [-1] * len(slots)
        counts = (self._setup(slot).params.logprobs for slot in slots.tolist())
        return [-1 if count is None else count for count in counts]

    def _count(self, setup: SlotSetup) -> None:
        """Note what the slot's request has said before."""
        if self._said is None:
            shape = (len(self._setups), self._num_ids)
            self._said = (
                torch.zeros(shape, dtype=torch.bool, device=self._device),
                torch.zeros(shape, dtype=torch.int32, device=self._device),
            )
        mask, counts = (said[setup.slot] for said in self._said)
        mask.zero_()
        counts.zero_()
        mask[self._ids(setup.prompt)] = True
        output = self._ids(setup.output)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _ids(self, tokens: Int32Array) -> torch.Tensor:
        """Ids that have a column; a prompt may hold ids beyond the tokenizer."""
        return torch.from_numpy(tokens[tokens < self._num_ids].astype(np.int64)).to(self._device)

    def sample(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """logits [S, V]; slots, positions int32 [S], the index that the new token takes in its sequence -> int64 [S], -1 for a row whose
        largest logit is not finite."""
        if self._on_device is not None:
            slots_there, positions_there = self._upload(slots, positions)
            tokens = self._on_device.sample(logits, slots_there, positions_there)
            if kind := self._on_device.kind(slots):
                self._on_device.resample(tokens, logits, slots_there, positions_there, kind)
            return tokens
        largest, tokens = logits[:, : self._num_ids].max(-1)
        self._replace(tokens, np.flatnonzero(~self._is_plain[slots]), logits, slots, positions)
        return torch.where(torch.isfinite(largest), tokens, NO_TOKEN)

    @property
    def on_device(self) -> DeviceSampler:
        """The state on a GPU, for whoever has slots and positions there."""
        assert self._on_device is not None
        return self._on_device

    def _replace(
        self, tokens: torch.Tensor, rows: npt.NDArray[np.intp], logits: torch.Tensor, slots: Int32Array, positions: Int32Array
    ) -> None:
        if len(rows):
            index = self._to_device(rows)
            chosen = logits[:, : self._num_ids][index].float()
            found = self._sample_rows(chosen, slots[rows], positions[rows].astype(np.int64))
            tokens[index] = torch.where(tokens[index] < 0, NO_TOKEN, found)

    def _sample_rows(self, logits: torch.Tensor, slots: Int32Array, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """fp32 [R, V] -> int64 [R]"""
        logits = self._adjust(logits, slots, positions)
        temperature = self._column("temperature", slots)
        tokens = logits.argmax(-1)
        drawn = np.flatnonzero([not self._setup(slot).params.is_greedy for slot in slots])
        if len(drawn):
            index, who = self._to_device(drawn), slots[drawn]
            scaled = logits[index] / temperature[index].unsqueeze(1)
            kept = filter_logits(scaled, self._to_device(self._top_k[who]), self._column("top_p", who), self._column("min_p", who))
            tokens[index] = sample(kept, self._to_device(self._seeds[who]), self._to_device(positions[drawn]))
        self._remember(slots, tokens)
        return tokens

    def _adjust(self, logits: torch.Tensor, slots: Int32Array, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """Bias, banned end ids, penalties, in this order."""
        for row, slot in enumerate(slots.tolist()):
            setup = self._setup(slot)
            if setup.params.logit_bias:
                ids = torch.tensor(list(setup.params.logit_bias), dtype=torch.int64, device=self._device)
                bias = torch.tensor(list(setup.params.logit_bias.values()), dtype=torch.float32, device=self._device)
                is_known = ids < self._num_ids
                logits[row].index_add_(0, ids[is_known], bias[is_known])
            if positions[row] < len(setup.prompt) + setup.params.min_tokens:
                banned = [token_id for token_id in sorted(setup.end_ids) if token_id < self._num_ids]
                logits[row, banned] = float("-inf")
        rows = np.flatnonzero(self._is_penalised[slots])
        if self._said is not None and len(rows):
            index, who = self._to_device(rows), slots[rows]
            mask, counts = (said[self._to_device(who)] for said in self._said)
            penalties = (self._column(f"{name}_penalty", who) for name in ("repetition", "frequency", "presence"))
            logits[index] = apply_penalties(logits[index], mask, counts, *penalties)
        return logits

    def _remember(self, slots: Int32Array, tokens: torch.Tensor) -> None:
        rows = np.flatnonzero(self._is_penalised[slots])
        if self._said is not None and len(rows):
            self._said[1][self._to_device(slots[rows]), tokens[self._to_device(rows)]] += 1

    def _setup(self, slot: int) -> SlotSetup:
        setup = self._setups[slot]
        assert setup is not None
        return setup

    def _column(self, name: str, slots: Int32Array) -> torch.Tensor:
        return torch.from_numpy(self._numbers[slots, COLUMNS.index(name)]).to(self._device)

    def _to_device(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def is_penalised(params: SamplingParams) -> bool:
    """True if what has been said changes the logits."""
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def is_plain(params: SamplingParams) -> bool:
    """True if the token is the argmax of the raw logits."""
    return params.is_greedy and not params.logit_bias and not params.min_tokens and not is_penalised(params)
