"""The kernel of the cut vocabulary against its twin: any block, also an empty one, and rows that fill no block of the kernel."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel import reference
from minisgl.kernel.gpu.embedding import vocab_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1, 96, 1500])
def test_every_block_gives_its_rows_and_zeros_for_the_rest(device, dtype, hidden):
    weight = torch.randn(10, hidden, device=device).to(dtype)
    ids = torch.tensor([0, 9, 3, 4, 3, 7], device=device)
    parts = [vocab_embedding(ids, weight[first:end], first) for first, end in ((0, 4), (4, 8), (8, 10), (10, 10))]
    for part, (first, end) in zip(parts, ((0, 4), (4, 8), (8, 10), (10, 10)), strict=True):
        assert torch.equal(part, reference.vocab_embedding(ids, weight[first:end], first))
    assert torch.equal(sum(parts), weight[ids])


def test_no_id_reads_outside_its_block(device):
    """Rows before and after the block hold what is no number."""
    weight = torch.full((6, 64), float("nan"), device=device)
    weight[2:4] = 1
    out = vocab_embedding(torch.arange(6, device=device), weight[2:4], 2)
    assert out[:, 0].tolist() == [0, 0, 1, 1, 0, 0]
    assert not bool(out.isnan().any())
