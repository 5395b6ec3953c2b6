"""The sampler's state on a GPU: what each slot wants and has said lies on the device, and a step asks the host for nothing.

Every row is first sampled from its raw logits, temperature and noise. Rows that want more are then done again, by kernels that leave the
others alone; which kernels these are, the slots of the step decide. Knows no requests. Called by the sampler and, through it, by the
CUDA graphs.

Letters: S sampled rows, N slots set up together, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from minisgl.core import MAX_BIASES, Int32Array, SamplingParams, SlotSetup
from minisgl.engine.memory import graph_size
from minisgl.kernel.gpu.adjust import IS_END, IS_PROMPT, ONE_OUTPUT, Said, Wishes, adjust, note
from minisgl.kernel.gpu.filter import Filters
from minisgl.kernel.gpu.sampling import make_workspace, resample, sample
from minisgl.kernel.staging import Uploader

__all__ = ["ADJUSTED", "FILTERED", "SIMPLE", "DeviceSampler"]

SIMPLE, FILTERED, ADJUSTED = range(3)
"""What a step's rows want at most: temperature; top-k, top-p or min-p; bias, banned ids or penalties."""
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTEGERS = ("top_k", "is_wanted", "banned_until", "num_biases")
MAX_INT32 = 2**31 - 1


class DeviceSampler:
    """Sampling state of `num_slots` slots and one for padding. Ids of `num_ids` and above are never sampled."""

    def __init__(self, num_slots: int, num_ids: int, device: torch.device) -> None:
        self._num_slots, self._num_ids, self._device = num_slots + 1, num_ids, device
        self._upload = Uploader(device)
        self._kinds = np.full(num_slots, SIMPLE, dtype=np.int8)
        defaults = torch.tensor([getattr(SamplingParams(), name) for name in FLOATS], dtype=torch.float32).view(torch.int32)
        defaults = torch.cat((defaults, torch.zeros(len(INTEGERS), dtype=torch.int32)))
        self._table = defaults.to(device).unsqueeze(1).repeat(1, self._num_slots)
        """int32 [FLOATS and INTEGERS, slots]; the bits of floats"""
        columns = {name: self._table[index].view(torch.float32) for index, name in enumerate(FLOATS)}
        columns |= {name: self._table[len(FLOATS) + index] for index, name in enumerate(INTEGERS)}
        self._seeds = torch.zeros(self._num_slots, dtype=torch.int64, device=device)
        self._filters = Filters(*(columns[name] for name in ("is_wanted", "temperature", "top_k", "top_p", "min_p")))
        wishes = ("is_wanted", "repetition_penalty", "frequency_penalty", "presence_penalty", "banned_until", "num_biases")
        self._wishes = Wishes(*(columns[name] for name in wishes))
        self._said: Said | None = None
        self._adjusted: torch.Tensor | None = None
        self._workspace = make_workspace(graph_size(num_slots), num_ids, device)  # a graph's padding rows are sampled as well

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """Begin slots anew; no slot is named twice."""
        if not setups:
            return
        for setup in setups:
            self._kinds[setup.slot] = kind_of(setup.params)
        slots = np.array([setup.slot for setup in setups], dtype=np.int32)
        floats = np.array([self._floats(setup.params) for setup in setups], dtype=np.float32)
        integers = np.array([self._integers(setup) for setup in setups], dtype=np.int32)
        seeds = np.array([setup.seed for setup in setups], dtype=np.uint64).view(np.int32).reshape(-1, 2)
        where, table, words = self._upload(slots, np.concatenate((floats.view(np.int32), integers), axis=1), seeds)
        where = where.long()
        self._table[:, where] = table.T
        self._seeds[where] = _join_words(words)
        adjusted = [setup for setup in setups if self._kinds[setup.slot] == ADJUSTED]
        if adjusted:
            self._describe(adjusted)

    def kind(self, slots: Int32Array) -> int:
        """What rows of these slots want at most: SIMPLE is 0, all others need `resample`."""
        return int(self._kinds[slots].max(initial=SIMPLE))

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """logits [S, V]; slots, positions int32 [S], the index that a token takes in its sequence -> int64 [S], -1 for a row whose largest
        logit is not finite. Right for slots of kind SIMPLE."""
        return sample(logits, self._filters.temperatures, self._seeds, positions, self._num_ids, self._workspace, slots)

    def resample(self, tokens: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, kind: int) -> None:
        """Replace the tokens, as `sample` gave them, of rows that want more. `kind`: that of the step's slots."""
        said = self._said
        if kind == ADJUSTED:
            assert said is not None
            logits = adjust(logits, slots, positions, self._wishes, said, out=self._room(logits.shape))
        resample(tokens, logits, slots, positions, self._filters, self._seeds, self._num_ids, self._workspace)
        if kind == ADJUSTED and said is not None:
            note(said.tokens, slots, tokens)

    def _room(self, shape: torch.Size) -> torch.Tensor:
        """Memory for adjusted logits: one for all steps and graphs, of which one runs at a time."""
        if self._adjusted is None or self._adjusted.numel() < shape.numel():
            self._adjusted = torch.empty(graph_size(self._num_slots - 1) * shape[1], dtype=torch.float32, device=self._device)
        return self._adjusted[: shape.numel()].view(shape)

    def _floats(self, params: SamplingParams) -> list[float]:
        if params.is_greedy:  # the likeliest token is always kept
            return [0.0, 1.0, 0.0, *(getattr(params, name) for name in FLOATS[3:])]
        return [getattr(params, name) for name in FLOATS]

    def _integers(self, setup: SlotSetup) -> list[int]:
        params = setup.params
        top_k = 0 if params.is_greedy else min(params.top_k, self._num_ids)
        banned_until = min(len(setup.prompt) + params.min_tokens, MAX_INT32) if params.min_tokens else 0
        return [top_k, int(kind_of(params) != SIMPLE), banned_until, len(self._biases(params))]

    def _biases(self, params: SamplingParams) -> list[tuple[int, float]]:
        return [(token, bias) for token, bias in params.logit_bias.items() if token < self._num_ids]

    def _describe(self, setups: list[SlotSetup]) -> None:
        """Tell the device what the slots' requests have said before, which ids end them, and their biases."""
        if self._said is None:
            stride = -(-self._num_ids // 16) * 16
            tokens, ids, biases = (
                torch.zeros(self._num_slots, size, dtype=torch.int32, device=self._device) for size in (stride, MAX_BIASES, MAX_BIASES)
            )
            self._said = Said(tokens, ids, biases.view(torch.float32))
        states = [self._state(setup) for setup in setups]
        named = [np.flatnonzero(state != 0).astype(np.int32) for state in states]  # of bool: a quarter of the time
        slots = np.array([setup.slot for setup in setups], dtype=np.int32)
        owners = slots.repeat([len(tokens) for tokens in named])
        values = np.concatenate([state[tokens] for state, tokens in zip(states, named, strict=True)])
        bias_ids, bias_bits = np.zeros((2, len(setups), MAX_BIASES), dtype=np.int32)
        for row, setup in enumerate(setups):
            for index, (token, bias) in enumerate(self._biases(setup.params)):
                bias_ids[row, index], bias_bits.view(np.float32)[row, index] = token, bias
        uploaded = self._upload(slots, owners, np.concatenate(named), values, bias_ids, bias_bits)
        where, owners_there, tokens_there = (tensor.long() for tensor in uploaded[:3])
        self._said.tokens.index_fill_(0, where, 0)
        self._said.tokens[owners_there, tokens_there] = uploaded[3]
        self._said.bias_ids[where] = uploaded[4]
        self._said.biases[where] = uploaded[5].view(torch.float32)

    def _state(self, setup: SlotSetup) -> npt.NDArray[np.int32]:
        """[V], as `Said.tokens`. Ids without a column, which a prompt may hold, are left out."""
        output = setup.output[setup.output < self._num_ids]
        state = np.bincount(output, minlength=self._num_ids).astype(np.int32) * ONE_OUTPUT
        state[setup.prompt[setup.prompt < self._num_ids]] |= IS_PROMPT
        state[[token for token in setup.end_ids if token < self._num_ids]] |= IS_END
        return state


def kind_of(params: SamplingParams) -> int:
    """What one request wants at most."""
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    if params.logit_bias or params.min_tokens or penalties != (1.0, 0.0, 0.0):
        return ADJUSTED
    is_filtered = not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return FILTERED if is_filtered else SIMPLE


def _join_words(words: torch.Tensor) -> torch.Tensor:
    """int32 [N, 2], low and high -> int64 [N]"""
    return (words[:, 1].long() << 32) | (words[:, 0].long() & 0xFFFFFFFF)
