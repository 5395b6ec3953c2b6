"""The tokenizer process (hops 3 and 11), or, with --num-tokenizer, the detokenizer process, which leaves the tokenizing itself to others.

Started by the launcher; ready once it knows the scheduler's limits.
"""

from __future__ import annotations

import sys
import threading

from minisgl.message import BackendReadyMsg
from minisgl.processes.child import Child, run_child
from minisgl.processes.run_files import tokenizer_addr
from minisgl.tokenizer.loader import load_tokenizer
from minisgl.tokenizer.worker import TokenizerWorker, WorkerAddresses


def main(child: Child) -> None:
    """Serve until the process is ended from outside."""
    config = child.config
    assert config.model_path is not None  # the launcher resolved it

    def report_ready(limits: BackendReadyMsg) -> None:
        child.report("ready", f"prompt and answer: at most {limits.max_seq_len} tokens")

    encoders = tuple(tokenizer_addr(config, number) for number in range(1, child.setup.own["num_tokenizer"] + 1))
    addresses = WorkerAddresses(config.zmq_detokenizer_addr, config.zmq_backend_addr, config.zmq_frontend_addr, encoders)
    TokenizerWorker(load_tokenizer(config.model_path), addresses, on_ready=report_ready).run(threading.Event())


if __name__ == "__main__":
    sys.exit(run_child(main))
