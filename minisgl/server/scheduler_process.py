"""One rank's scheduler process (hops 4 to 10). Started by the launcher; ready once the model is loaded and the sockets are open."""

from __future__ import annotations

import os
import sys

from minisgl.message import BackendReadyMsg
from minisgl.server.child import Child, run_child


def main(child: Child) -> None:
    """Load, report, serve until the process is ended from outside."""
    config = child.config
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: idle threads sleep and leave the cores to others
    import torch

    from minisgl.scheduler.scheduler import Scheduler

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _num_cores() // config.tp_info.size))
    scheduler = Scheduler(config)
    scheduler.sync_all_ranks()
    limits = scheduler.engine.limits
    scheduler.send_result(BackendReadyMsg(max_seq_len=limits.max_seq_len, num_pool_tokens=limits.num_pool_tokens))
    pool = f"{limits.num_pages} pages of {limits.page_size} tokens, {limits.num_pool_tokens} tokens"
    child.report("ready", f"on {limits.device_type}; KV pool: {pool}")
    scheduler.run_forever()


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(run_child(main))
