"""Several ranks: each computes with the communicator and with cut layers, and writes what it got. Started by test_communicator.py.

    python -m tests.distributed.rank SIZE DIRECTORY

DIRECTORY holds `models` (checkpoints) and takes `store` (made by the group) and a `RANK.pt` of each. The ranks are forks of this
process, so that torch is imported once; it has started no thread by then.
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minisgl.attention import make_attention_backend
from minisgl.core import Context
from minisgl.distributed import Communicator, DistributedInfo, make_communicator
from minisgl.distributed.groups import Groups
from minisgl.engine.base import EngineLimits
from minisgl.engine.engine import Engine
from minisgl.kvcache.pool import make_kv_pool
from minisgl.layers.attention import local_kv_heads
from minisgl.layers.base import Spec
from minisgl.layers.embedding import LMHead, VocabEmbedding, vocab_block
from minisgl.layers.linear import RowLinear
from minisgl.models.config import load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import load_weights
from tests.tools.plan import Planner

SHAPES = ((1,), (7,), (3, 5), (0, 4), (2, 3, 4), (64, 513))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCAB, HIDDEN = 1003, 24
CPU = torch.device("cpu")


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same on whoever asks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def collectives(comm: Communicator, rank: int) -> dict[str, torch.Tensor]:
    results = {}
    for shape in SHAPES:
        for dtype in DTYPES:
            name = f"{shape} {dtype}"
            results[f"sum {name}"] = comm.all_reduce(values(shape, dtype, rank)).clone()
            results[f"blocks {name}"] = comm.all_gather(values(shape, dtype, rank))
    results["sum transposed"] = comm.all_reduce(values((6, 4), torch.float32, rank).t()).clone()
    results["blocks transposed"] = comm.all_gather(values((6, 4), torch.float32, rank).t())
    return results


def vocabulary(comm: Communicator, tp: DistributedInfo) -> dict[str, torch.Tensor]:
    """Embedding and head over a vocabulary that no number of ranks divides, for several batch sizes."""
    spec, context = Spec(torch.float32, CPU, tp), Context(None, None, None, comm)
    first, end = vocab_block(VOCAB, tp.rank, tp.size)
    weight = values((VOCAB, HIDDEN), torch.float32, 100)
    embedding = VocabEmbedding(VOCAB, HIDDEN, spec)
    embedding.weight.copy_(weight[first:end])
    tied, head = LMHead(VOCAB, HIDDEN, spec, embedding), LMHead(VOCAB, HIDDEN, spec, None)
    head.weight.copy_(weight[first:end])
    results = {}
    for count in (0, 1, 2, 5, 70):
        ids = torch.arange(count) * 14 % VOCAB
        results[f"rows {count}"] = embedding.forward(ids, context).clone()
        hidden = values((count, HIDDEN), torch.float32, 200)
        results[f"tied logits {count}"] = tied.forward(hidden, context).clone()
        results[f"logits {count}"] = head.forward(hidden, context).clone()
    return results


def row_linear(comm: Communicator, tp: DistributedInfo) -> torch.Tensor:
    """x W^T + b with the inputs cut; the bias counts once."""
    share = HIDDEN // tp.size
    layer = RowLinear(share, 10, True, Spec(torch.float32, CPU, tp))
    own = slice(tp.rank * share, (tp.rank + 1) * share)
    layer.weight.copy_(values((10, HIDDEN), torch.float32, 300)[:, own])
    layer.bias.copy_(values((10,), torch.float32, 301))
    return layer.forward(values((3, HIDDEN), torch.float32, 302)[:, own], Context(None, None, None, comm))


def model_logits(model_dir: Path, comm: Communicator, tp: DistributedInfo) -> torch.Tensor:
    """Logits after a prompt and two further tokens, of the model cut over the ranks."""
    config = load_model_config(model_dir)
    model = CausalLM(config, Spec(torch.float32, CPU, tp))
    load_weights(model, model_dir, config, tp)
    kv_heads = local_kv_heads(config.attention.num_kv_heads, tp.size)
    pool = make_kv_pool(config.num_layers, 8, kv_heads, 16, config.attention.head_dim, torch.float32, CPU)
    attention = make_attention_backend("torch", pool, torch.zeros(3, 4, dtype=torch.int32))
    limits = EngineLimits(num_pages=8, page_size=16, max_seq_len=64, max_running_req=2, vocab_size=config.vocab_size)
    engine = Engine(model, attention, comm, limits, None)
    planner, logits = Planner(8, 16, 2), []
    planner.add(0, [3, 1, 4, 1, 5, 9, 2, 6])
    planner.add(1, [96, 5, 3])
    for tokens in ((7, 8), (90, 91), (1, 2)):
        with torch.inference_mode():
            logits.append(engine.forward(planner.plan({uid: row.num_left for uid, row in planner.rows.items()})).clone())
        for uid, row in planner.rows.items():
            row.tokens.append(tokens[uid])
    return torch.stack(logits)


def compute(tp: DistributedInfo, group: Any, directory: Path) -> dict[str, torch.Tensor]:
    comm = make_communicator(tp, Groups(group, group), CPU)
    results = collectives(comm, tp.rank) | vocabulary(comm, tp)
    results["row linear"] = row_linear(comm, tp).clone()
    results |= {f"model {path.name}": model_logits(path, comm, tp) for path in sorted((directory / "models").iterdir())}
    return results


def run_rank(tp: DistributedInfo, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), tp.size)
    dist.init_process_group("gloo", store=store, rank=tp.rank, world_size=tp.size, timeout=timedelta(seconds=60))
    try:
        torch.save(compute(tp, dist.group.WORLD, directory), directory / f"{tp.rank}.pt")
    finally:
        dist.destroy_process_group()


def main() -> int:
    size, directory = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                run_rank(DistributedInfo(rank, size), directory)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main())
