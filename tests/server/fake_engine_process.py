"""A scheduler process with the real scheduler, and the engine that checks its pages instead of a model: for one rank or several.

Whenever nothing is left to do it says where the pages are. Run as a child by the launcher.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from minisgl.distributed.groups import join_groups
from minisgl.processes.child import Child, run_child
from minisgl.processes.served_scheduler import ServedScheduler, serve_scheduler
from minisgl.utils import make_private_directory
from tests.scheduler.fake_engine import LIMITS, FakeEngine

BYTE_LIMITS = replace(LIMITS, num_pages=2000, max_running_req=64, vocab_size=257, end_ids=frozenset({256}))


class ForgetfulEngine(FakeEngine):
    """Keeps no history: the process's memory is measured."""

    def submit(self, batch):
        self.events.clear()
        self.batches.clear()
        return super().submit(batch)


class ReportingScheduler(ServedScheduler):
    def __init__(self, child: Child, engine: FakeEngine) -> None:
        self._child = child
        super().__init__(child.config, engine, child.heart)

    def run_when_idle(self) -> None:
        super().run_when_idle()
        counts = self.page_counts
        self._child.report("stage", f"idle: {counts.free} free, {counts.evictable} cached, {counts.total} in all")


def main(child: Child) -> None:
    torch.set_num_threads(1)
    config = child.config
    engine = ForgetfulEngine(BYTE_LIMITS)
    make_private_directory(config.rendezvous_path.parent)
    engine.cpu_group = join_groups(config.tp_info, config.rendezvous_path, torch.device("cpu")).cpu
    serve_scheduler(child, ReportingScheduler(child, engine))


if __name__ == "__main__":
    sys.exit(run_child(main))
