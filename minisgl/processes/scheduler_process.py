"""One rank's scheduler process (hops 4 to 10); ready once the model has computed something on every rank.

Started by the server's launcher and by the offline class.
"""

from __future__ import annotations

import os
import sys

from minisgl.processes.child import Child, run_child


def main(child: Child) -> None:
    """Load, try out, report, serve until the process is ended from outside."""
    config = child.config
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: idle threads sleep and leave the cores to others
    import torch

    from minisgl.engine.engine import make_engine
    from minisgl.processes.served_scheduler import ServedScheduler, serve_scheduler

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _num_cores() // config.tp_info.size))
    engine = make_engine(config, config.rendezvous_path, log=lambda line: child.report("stage", f"model loaded; {line}"))
    serve_scheduler(child, ServedScheduler(config, engine, child.heart))


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(run_child(main))
