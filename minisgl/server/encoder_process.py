"""A process that only tokenizes, one of --num-tokenizer (hop 3). Started by the launcher; ready once the detokenizer has spoken to it."""

from __future__ import annotations

import sys
import threading

from minisgl.message import BackendReadyMsg
from minisgl.processes.child import Child, run_child
from minisgl.processes.run_files import tokenizer_addr
from minisgl.tokenizer.encoding import serve_encoder
from minisgl.tokenizer.loader import load_tokenizer


def main(child: Child) -> None:
    """Serve until the process is ended from outside."""
    config = child.config
    assert config.model_path is not None  # the launcher resolved it

    def report_ready(_: BackendReadyMsg) -> None:
        child.report("ready")

    inbox = tokenizer_addr(config, child.setup.own["number"])
    serve_encoder(load_tokenizer(config.model_path), inbox, config.zmq_detokenizer_addr, threading.Event(), report_ready)


if __name__ == "__main__":
    sys.exit(run_child(main))
