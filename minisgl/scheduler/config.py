"""What a scheduler is told besides its engine's settings, and where it finds the other processes. A frozen value.

Constructing one touches neither disk nor model. The addresses are a pure function of `_unique_suffix`, so that processes that share the
suffix find each other. Used by the launcher, by `SchedulerIOMixin`, and by whoever talks to a scheduler.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from minisgl.engine.config import EngineConfig, check_choice, check_count, check_flag, check_text
from minisgl.env import is_overlap_disabled
from minisgl.errors import ConfigError
from minisgl.utils.run_dir import ipc_address, ipc_path

CACHE_TYPES = ("radix", "naive")


def _fresh_suffix() -> str:
    return secrets.token_hex(4)


@dataclass(frozen=True)
class SchedulerConfig(EngineConfig):
    """Settings of one rank's scheduler. Raises ConfigError for a value, or a combination, that cannot be honoured."""

    max_extend_tokens_beside_decode: int = 0
    """The same for a prefill step while requests are decoding, which wait for it; 0 is 2048 on CUDA and 128 on a CPU, and offline, where
    nobody watches the answers grow, `max_extend_tokens`."""
    reserve_tokens: int = 512
    """Tokens of output for which a running request keeps room when others are admitted."""
    cache_type: str = "radix"
    """One of CACHE_TYPES. "radix" shares the pages of equal prefixes, "naive" reuses none."""
    overlap: bool | None = None
    """Plan a step while the one before it runs; None does so where the device computes asynchronously."""
    raise_integrity_errors: bool = False
    """Stop when the check of the page ledger while idle finds an error (for tests); otherwise it is logged and counted."""
    offline_mode: bool = False
    """Requests come from and replies go to methods of the scheduler's subclass, not sockets. One rank only."""
    record: str | None = None
    """New file into which rank 0 writes what it hears and does, prompts included, for `minisgl replay`; None: nothing is written."""
    backend_create_detokenizer_link: bool = True
    """True: rank 0 binds the address towards the detokenizer. False: it connects, and the detokenizer binds."""
    _unique_suffix: str = field(default_factory=_fresh_suffix)
    """Tells the sockets of servers apart: letters, digits and . _ = -; a fresh random one unless given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_extend_tokens_beside_decode", self.max_extend_tokens_beside_decode, 0, "--max-extend-tokens-beside-decode")
        check_count("reserve_tokens", self.reserve_tokens, 1, "--reserve-tokens")
        if self.overlap is not None:
            check_flag("overlap", self.overlap, "--overlap")
        check_choice("cache_type", self.cache_type, CACHE_TYPES, "--cache-type")
        check_flag("raise_integrity_errors", self.raise_integrity_errors, "raise_integrity_errors")
        check_flag("offline_mode", self.offline_mode, "offline_mode")
        check_flag("backend_create_detokenizer_link", self.backend_create_detokenizer_link, "backend_create_detokenizer_link")
        if self.record is not None:
            check_text("record", self.record, "--record")
        check_text("_unique_suffix", self._unique_suffix, "_unique_suffix")
        ipc_address(self._unique_suffix, max(("backend", "detokenizer", "broadcast", "frontend", "rendezvous"), key=len))
        if self.offline_mode and self.tp_info.size > 1:
            raise ConfigError(
                f"offline_mode with {self.tp_info.size} ranks found; it runs on one rank, set tp_info to DistributedInfo(0, 1)"
            )

    def is_overlapped(self, is_asynchronous: bool) -> bool:
        """Whether a step is planned while the one before it runs, on a device that computes asynchronously or does not."""
        return (is_asynchronous if self.overlap is None else self.overlap) and not is_overlap_disabled()

    @property
    def zmq_backend_addr(self) -> str:
        """Where rank 0 takes its messages; it binds, tokenizer and detokenizer push."""
        return ipc_address(self._unique_suffix, "backend")

    @property
    def zmq_detokenizer_addr(self) -> str:
        """Where rank 0 sends sampled tokens; who binds is `backend_create_detokenizer_link`."""
        return ipc_address(self._unique_suffix, "detokenizer")

    @property
    def zmq_scheduler_broadcast_addr(self) -> str:
        """Where rank 0 publishes its messages to the other ranks; it binds."""
        return ipc_address(self._unique_suffix, "broadcast")

    @property
    def zmq_frontend_addr(self) -> str:
        """Where the API takes its replies; it binds, tokenizer and detokenizer push."""
        return ipc_address(self._unique_suffix, "frontend")

    @property
    def rendezvous_path(self) -> Path:
        """File through which the ranks' process group forms. Its directory is made by `utils.make_private_directory`."""
        return ipc_path(ipc_address(self._unique_suffix, "rendezvous"))
