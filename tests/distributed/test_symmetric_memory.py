"""When GPUs sum through each other's memory, and when NCCL does. The kernel itself runs in tests/gpu/test_ranks.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from minisgl.distributed import communicator
from minisgl.distributed.communicator import SYMMETRIC_BYTES, SymmetricMemory, share_buffer

GROUP, CPU_GROUP = SimpleNamespace(group_name="ranks"), object()
GPU = SimpleNamespace(type="cuda", index=0)


@pytest.fixture
def by_nccl(monkeypatch):
    """The tensors that are left to NCCL."""
    seen = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: seen.append(tensor))
    return seen


@pytest.fixture
def by_kernel(monkeypatch):
    """Sizes of what the kernel sums; two ranks with equal numbers."""
    seen = []

    def twice(shared, operation, name):
        assert (operation, name) == ("sum", "ranks")
        assert shared.dtype in (torch.bfloat16, torch.float32)  # what torch's kernel takes
        assert shared.storage_offset() == 0
        seen.append(shared.numel())
        return shared * 2

    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace(one_shot_all_reduce=twice))
    return seen


def test_small_sums_go_through_the_buffer_and_leave_their_input_alone(by_nccl, by_kernel):
    ranks = SymmetricMemory(GROUP, 2, torch.zeros(4096, dtype=torch.uint8))
    for values in (torch.randn(8, 64).bfloat16(), torch.randn(2, 512), torch.randn(64, 2).t(), torch.randn(9)[1:]):
        kept = values.clone()
        total = ranks.all_reduce(values)
        assert torch.equal(total, kept * 2)
        assert total.shape == values.shape
        assert torch.equal(values, kept)
    assert ranks.description == "symmetric memory up to 0.00390625 MiB, nccl beyond"
    assert (by_kernel, by_nccl) == ([512, 1024, 128, 8], [])


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4096, 1), torch.ones(3, 1), torch.ones(0, 64), torch.ones(8, 8, dtype=torch.float16)],
    ids=["larger than the buffer", "no whole 16 bytes", "nothing", "float16"],
)
def test_what_the_kernel_does_not_take_is_left_to_nccl(by_nccl, by_kernel, tensor):
    assert SymmetricMemory(GROUP, 2, torch.zeros(8192, dtype=torch.uint8)).all_reduce(tensor) is tensor
    assert (len(by_nccl), by_kernel) == (1, [])


@pytest.fixture
def machine(monkeypatch):
    """Two GPUs that read each other; what the other rank answers can be changed."""
    state = SimpleNamespace(peers=True, others=[1, 1], votes=[])

    def agree(answer, group):
        assert group is CPU_GROUP
        state.votes.append(answer)
        return answer and bool(state.others[len(state.votes) - 1])

    monkeypatch.delenv("MINISGL_DISABLE_SYMMETRIC_MEMORY", raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setattr(communicator, "_all_agree", agree)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: state.peers)
    monkeypatch.setattr(symmetric, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", lambda tensor, group: None)
    return state


def test_a_buffer_is_shared_where_all_ranks_can(machine):
    buffer = share_buffer(GROUP, CPU_GROUP, 2, GPU)
    assert (len(buffer), buffer.dtype, machine.votes) == (SYMMETRIC_BYTES[2], torch.uint8, [True, True])


def test_no_rank_shares_if_one_cannot(machine, monkeypatch):
    machine.others = [0, 1]
    assert share_buffer(GROUP, CPU_GROUP, 2, GPU) is None
    machine.others, machine.votes = [1, 0], []
    assert share_buffer(GROUP, CPU_GROUP, 2, GPU) is None
    assert machine.votes == [True, True]
    machine.others, machine.votes, machine.peers = [1, 1], [], False
    assert share_buffer(GROUP, CPU_GROUP, 2, GPU) is None
    assert machine.votes == [False]
    machine.votes, machine.peers = [], True
    monkeypatch.setenv("MINISGL_DISABLE_SYMMETRIC_MEMORY", "1")
    assert share_buffer(GROUP, CPU_GROUP, 2, GPU) is None
    assert machine.votes == [False]


def test_a_rank_whose_memory_cannot_be_shared_says_so_and_votes_no(machine, monkeypatch, caplog):
    def refuse(tensor, group):
        raise RuntimeError("no peer access")

    monkeypatch.setattr(symmetric, "rendezvous", refuse)
    assert share_buffer(GROUP, CPU_GROUP, 2, GPU) is None
    assert machine.votes == [True, False]
    assert "sums over the ranks are left to NCCL: the GPUs' memory cannot be shared: no peer access" in caplog.text


@pytest.mark.parametrize(("size", "kind"), [(3, "cuda"), (2, "cpu")])
def test_other_numbers_of_ranks_and_cpus_do_not_even_ask(machine, size, kind):
    assert share_buffer(GROUP, CPU_GROUP, size, SimpleNamespace(type=kind, index=0)) is None
    assert machine.votes == []
