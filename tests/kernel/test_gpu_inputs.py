"""The kernels that feed a decode step against the same in plain Python."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel.gpu.inputs import decode_inputs, remember, update_page_table


@pytest.mark.parametrize("num_rows", [1, 7, 128, 200])
def test_decode_inputs(device, num_rows):
    plan = torch.full((6, 256), 2**31 - 1, dtype=torch.int32)  # what lies beyond the step's columns leads nowhere
    plan[0, :num_rows] = torch.randperm(300)[:num_rows]
    plan[1, :num_rows] = torch.where(torch.rand(num_rows) < 0.5, -1, torch.randint(0, 150_000, (num_rows,)))
    plan[2, :num_rows] = torch.randint(0, 40_000, (num_rows,))
    last_tokens = torch.randint(0, 150_000, (300,))
    ids, positions = decode_inputs(plan.to(device), last_tokens.to(device), num_rows)
    columns = plan[:3, :num_rows].T.tolist()
    assert ids.tolist() == [int(last_tokens[slot]) if given < 0 else given for slot, given, _ in columns]
    assert positions.tolist() == [position for _, _, position in columns]
    assert ids.dtype == positions.dtype == torch.int64


@pytest.mark.parametrize("num_updates", [0, 1, 129, 150])
def test_update_page_table(device, num_updates):
    table = torch.randint(0, 1000, (40, 21), dtype=torch.int32)
    places = torch.randperm(40 * 21)[:150]
    updates = torch.stack((places // 21, places % 21, torch.randint(0, 1000, (150,))), dim=1).int()
    updates[num_updates:] = 2**31 - 1  # not read
    expected = table.clone()
    for row, column, page in updates[:num_updates].tolist():
        expected[row, column] = page
    table = table.to(device)
    update_page_table(table, updates.to(device), torch.tensor([num_updates], dtype=torch.int32, device=device))
    assert torch.equal(table.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_rows", [1, 130])
def test_remember(device, dtype, num_rows):
    last_tokens, slots = torch.randint(0, 100, (300,)), torch.randperm(300)[:num_rows]
    tokens = torch.randint(-1, 3, (num_rows,))
    expected = last_tokens.clone()
    expected[slots] = tokens.clamp(min=0)
    last_tokens = last_tokens.to(device)
    remember(last_tokens, slots.to(dtype).to(device), tokens.to(device))
    assert torch.equal(last_tokens.cpu(), expected)
