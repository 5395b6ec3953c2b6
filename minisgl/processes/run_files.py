"""The files of one server in the run directory: claimed before the start, removed when all is over.

Called by whoever starts processes, and by these.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from minisgl.scheduler.config import SchedulerConfig
from minisgl.utils.run_dir import claim_socket_path, ipc_address, ipc_path

__all__ = ["MAX_TOKENIZERS", "claim_run_files", "remove_run_files", "tokenizer_addr"]

MAX_TOKENIZERS = 16
"""Processes that only tokenize."""


def tokenizer_addr(config: SchedulerConfig, number: int) -> str:
    """Where the process that only tokenizes listens; the first has number 1."""
    return ipc_address(config._unique_suffix, f"tokenizer-{number}")


def claim_run_files(config: SchedulerConfig) -> None:
    """See that no live server uses this suffix, then remove what a dead one left: ranks that met an old rendezvous would never meet.

    Raises ConfigError as `claim_socket_path` does; nothing has been removed then.
    """
    for path in _socket_paths(config):
        claim_socket_path(path)
    remove_run_files(config)


def remove_run_files(config: SchedulerConfig) -> None:
    """Remove them, whoever made them; only when all of the server's processes are gone or about to go."""
    for path in (*_socket_paths(config), config.rendezvous_path):
        path.unlink(missing_ok=True)


def _socket_paths(config: SchedulerConfig) -> Iterator[Path]:
    addresses = [config.zmq_backend_addr, config.zmq_detokenizer_addr, config.zmq_scheduler_broadcast_addr, config.zmq_frontend_addr]
    return map(ipc_path, addresses + [tokenizer_addr(config, number) for number in range(1, MAX_TOKENIZERS + 1)])
