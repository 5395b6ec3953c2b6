"""Moves a step's small arrays between host and device without waiting: pinned blocks used in turn, each guarded by an event.

A block is written again only after the copy from it has been done, however far the host runs ahead. On a CPU nothing is copied. Knows
arrays only. Called by the engine and the attention backends.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Pending", "PinnedRing", "Readback", "Uploader"]

Int32Array = npt.NDArray[np.int32]
NUM_BLOCKS = 16
"""Copies that may be under way before the host waits for the oldest. A step makes up to six, some of them behind its forward; two steps are
in flight."""
LEAST_CAPACITY = 4096


class _Block:
    """Pinned memory and the event after which it may be written again."""

    def __init__(self, capacity: int) -> None:
        self.tensor = torch.empty(capacity, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self.array: Int32Array = self.tensor.numpy()
        self.event: Any = None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class PinnedRing:
    """Host blocks of int32, used in turn."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self._blocks = [_Block(0) for _ in range(num_blocks)]
        self._next = 0

    def take(self, size: int) -> _Block:
        """A block of at least `size` elements from which no copy is under way; whoever copies sets its event."""
        index, self._next = self._next, (self._next + 1) % len(self._blocks)
        block = self._blocks[index]
        block.wait()
        if len(block.array) < size:
            block = self._blocks[index] = _Block(max(LEAST_CAPACITY, 1 << (size - 1).bit_length()))
        return block

    @staticmethod
    def copy(block: _Block, target: torch.Tensor, size: int) -> None:
        """Begin to copy the first `size` elements of a block to `target` [size or more] on the device."""
        target[:size].copy_(block.tensor[:size], non_blocking=True)
        if target.is_cuda:
            block.event = torch.cuda.current_stream(target.device).record_event(block.event)


class Uploader:
    """Host arrays to device tensors, in one copy per call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = PinnedRing()

    def __call__(self, *arrays: Int32Array) -> list[torch.Tensor]:
        """int32 arrays -> int32 tensors of the same shapes on the device. On a CPU they share the arrays' memory."""
        if self._device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        total = sum(array.size for array in arrays)
        target = torch.empty(total, dtype=torch.int32, device=self._device)
        block = self._ring.take(total)
        np.concatenate([array.reshape(-1) for array in arrays], out=block.array[:total])
        self._ring.copy(block, target, total)
        ends = np.cumsum([array.size for array in arrays]).tolist()
        return [target[end - array.size : end].view(array.shape) for end, array in zip(ends, arrays, strict=True)]


class Pending(Protocol):
    """Numbers that the device is still computing."""

    def read(self) -> Int32Array:
        """Wait for them; called once."""


class _OnHost:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def read(self) -> Int32Array:
        result: Int32Array = self._tensor.to(torch.int32).numpy()
        return result


class _InBlock:
    def __init__(self, block: _Block, size: int) -> None:
        self._block, self._size = block, size

    def read(self) -> Int32Array:
        self._block.wait()
        result: Int32Array = self._block.array[: self._size].copy()
        return result


class Readback:
    """Device tensors to the host: started when they have been launched, read when they are needed.

    At most `NUM_BLOCKS` may be unread at a time, for the next one takes the oldest's block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = PinnedRing()

    def start(self, tensor: torch.Tensor) -> Pending:
        """Begin to copy a tensor of integers [n]; its memory may be reused by later work of the stream."""
        if self._device.type != "cuda":
            return _OnHost(tensor)
        block = self._ring.take(len(tensor))
        block.tensor[: len(tensor)].copy_(tensor.to(torch.int32), non_blocking=True)
        block.event = torch.cuda.current_stream(self._device).record_event(block.event)
        return _InBlock(block, len(tensor))
