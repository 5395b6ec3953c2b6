"""Two ranks that hear the same, without a model.

The main process plays the tokenizer: it sends three requests in a row. Two rank processes receive them through `SchedulerIOMixin`; rank 0
takes them from the socket and hands their bytes on to rank 1. Run it with `python examples/scheduler_io.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from minisgl.core import SamplingParams
from minisgl.distributed import DistributedInfo
from minisgl.message import BaseBackendMsg, UserMsg
from minisgl.scheduler.config import SchedulerConfig
from minisgl.utils import ZmqPushQueue

NUM_RANKS = 2
NUM_MESSAGES = 3
DEADLINE_S = 100.0


def make_config(rank: int, suffix: str) -> SchedulerConfig:
    """Processes that share the suffix find each other."""
    return SchedulerConfig(model_path="unused", tp_info=DistributedInfo(rank, NUM_RANKS), _unique_suffix=suffix)


def run_rank(rank: int, suffix: str, rendezvous: str) -> None:
    """One rank: receive until all messages have come, then say in which order."""
    import torch
    import torch.distributed as dist

    from minisgl.scheduler.io import SchedulerIOMixin

    class Listener(SchedulerIOMixin):
        def run_when_idle(self) -> None:
            """A scheduler would check its cache here."""

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS)
    listener = Listener(make_config(rank, suffix), dist.group.WORLD)
    listener.sync_all_ranks()
    uids: list[int] = []
    while len(uids) < NUM_MESSAGES:
        uids += [message.uid for message in listener.receive_msg(blocking=not uids) if isinstance(message, UserMsg)]
    # The line and its end in one write: the ranks share the terminal.
    print(f"the uid sequence rank {rank} received: {uids}\n", end="", flush=True)
    listener.sync_all_ranks()
    listener.close()
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, send, wait. Returns 0 if both ranks ended well."""
    config = make_config(0, f"example-{os.getpid()}")
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[bytes]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        ZmqPushQueue[BaseBackendMsg](config.zmq_backend_addr, create=False, encoder=BaseBackendMsg.encoder) as to_rank_0,
    ):
        rendezvous = str(Path(directory) / "rendezvous")
        try:
            for rank in range(NUM_RANKS):
                command = [sys.executable, __file__, str(rank), config._unique_suffix, rendezvous]
                ranks.append(subprocess.Popen(command, env={**os.environ, **settings}))
            for uid in range(NUM_MESSAGES):
                prompt = np.arange(uid + 1, dtype=np.int32)
                to_rank_0.put(UserMsg(uid=uid, input_ids=prompt, sampling_params=SamplingParams(max_tokens=4)))
            codes = [process.wait(DEADLINE_S) for process in ranks]
            return int(any(codes))
        finally:
            for process in ranks:
                process.kill()
                process.wait()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    run_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    os._exit(0)  # all is closed; the ordinary exit of a process that had gloo threads aborts now and then
