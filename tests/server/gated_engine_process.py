"""A scheduler process with the real scheduler and an engine that waits before each step, for a byte from the FIFO that GATE names.

It waits while the file GATE.closed exists, and says first what the step will compute. Two requests at a time, prompts in chunks of CHUNK
tokens. Run as a child by the launcher.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from minisgl.processes.child import Child, run_child
from minisgl.processes.served_scheduler import serve_scheduler
from tests.server.fake_engine_process import BYTE_LIMITS, ForgetfulEngine, ReportingScheduler

CHUNK = 16
RUNNING = 2


class GatedEngine(ForgetfulEngine):
    def __init__(self, child: Child) -> None:
        super().__init__(replace(BYTE_LIMITS, num_pages=400, max_running_req=RUNNING))
        self._child = child
        self._gate = os.open(os.environ["GATE"], os.O_RDONLY)
        self._closed = Path(os.environ["GATE"] + ".closed")

    def submit(self, batch):
        if self._closed.exists():
            self._child.report("stage", f"step: {batch.extend_lens.tolist()} tokens of {list(batch.uids)}")
            os.read(self._gate, 1)
        return super().submit(batch)


def main(child: Child) -> None:
    torch.set_num_threads(1)
    child.config = replace(child.config, max_extend_tokens=CHUNK, max_extend_tokens_beside_decode=CHUNK)
    serve_scheduler(child, ReportingScheduler(child, GatedEngine(child)))


if __name__ == "__main__":
    sys.exit(run_child(main))
