"""Small arrays on their way between host and device: nothing is rewritten while it travels."""

import numpy as np
import pytest
import torch

from minisgl.kernel import staging
from minisgl.kernel.staging import PinnedRing, Readback, Uploader


class Event:
    """Done when somebody waits for it."""

    def __init__(self):
        self.num_waits = 0

    def synchronize(self):
        self.num_waits += 1


def test_a_block_is_given_again_only_after_its_copy(monkeypatch):
    ring = PinnedRing(2)
    first = ring.take(10)
    first.event = Event()
    second = ring.take(10)
    assert second is not first
    assert first.event.num_waits == 0
    assert ring.take(10) is first
    assert first.event.num_waits == 1


def test_a_block_that_is_too_small_is_replaced_after_its_copy():
    ring = PinnedRing(1)
    small = ring.take(10)
    small.event = Event()
    large = ring.take(10 * staging.LEAST_CAPACITY)
    assert large is not small
    assert small.event.num_waits == 1
    assert len(large.array) >= 10 * staging.LEAST_CAPACITY


def test_arrays_arrive_with_their_shapes(device):
    arrays = [np.arange(5, dtype=np.int32), np.empty((0, 3), dtype=np.int32), np.arange(6, dtype=np.int32).reshape(3, 2)]
    sent = Uploader(device)(*arrays)
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.device.type == device.type
        assert np.array_equal(tensor.cpu().numpy(), array)


def test_tokens_come_back(device):
    pending = Readback(device).start(torch.tensor([3, -1, 7], device=device))
    assert pending.read().tolist() == [3, -1, 7]


@pytest.mark.gpu
def test_a_hundred_uploads_ahead_of_a_busy_device_all_arrive_whole():
    device = torch.device("cuda")
    upload = Uploader(device)
    matrix = torch.randn(4096, 4096, device=device)
    sums, expected = [], []
    for step in range(100):
        for _ in range(3):
            matrix = (matrix @ matrix).clamp(-1, 1)  # the copies queue behind this
        (sent,) = upload(np.full(1000, step, dtype=np.int32))
        sums.append(sent.sum())
        expected.append(1000 * step)
    assert [int(total) for total in sums] == expected


@pytest.mark.gpu
def test_a_ring_without_its_events_is_found_out(monkeypatch):
    """The test above can fail: where nobody waits, blocks are rewritten under their copies."""
    monkeypatch.setattr(staging._Block, "wait", lambda self: None)
    with pytest.raises(AssertionError):
        test_a_hundred_uploads_ahead_of_a_busy_device_all_arrive_whole()
