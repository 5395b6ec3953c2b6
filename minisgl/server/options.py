"""What `minisgl serve` is told, and the same as the launcher hands it to its children. Frozen values; JSON on the way."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from minisgl.distributed.info import DistributedInfo
from minisgl.engine.config import check_count, check_text
from minisgl.errors import ConfigError
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server.http_options import HttpOptions, check_seconds
from minisgl.server.run_files import MAX_TOKENIZERS

__all__ = ["ChildSetup", "ServerOptions", "settings_of"]

STEP_TIMEOUT_S = {"cpu": 60.0, "cuda": 10.0}
"""Where --step-timeout is 0."""


@dataclass(frozen=True)
class ServerOptions:
    """Settings of one server. Raises ConfigError for a combination that no server could honour."""

    scheduler: SchedulerConfig
    """Of rank 0; `tp_info.size` ranks are started."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 1919
    """TCP port to listen on; 0 is any free one."""
    served_model_name: str | None = None
    """What clients call the model; None: its name on the hub, or the last part of its path."""
    num_tokenizer: int = 0
    """Processes that only tokenize, 0 to MAX_TOKENIZERS, beside the one that turns ids into text; 0: that one does both."""
    drain_timeout: float = 5.0
    """Seconds that running requests get after SIGTERM; 0 ends them at once."""
    step_timeout: float = 0.0
    """Seconds after which a step counts as stuck; 0 is STEP_TIMEOUT_S of the device."""
    http: HttpOptions = field(default_factory=HttpOptions)
    """Limits, key and origins."""

    def __post_init__(self) -> None:
        check_count("port", self.port, 0, "--port", high=65535)
        check_count("num_tokenizer", self.num_tokenizer, 0, "--num-tokenizer", high=MAX_TOKENIZERS)
        check_seconds("drain_timeout", self.drain_timeout, "--drain-timeout")
        check_seconds("step_timeout", self.step_timeout, "--step-timeout")
        if self.served_model_name is not None:
            check_text("served_model_name", self.served_model_name, "--served-model-name")
        if self.scheduler.backend_create_detokenizer_link or self.scheduler.offline_mode:
            raise ConfigError("a server's SchedulerConfig wants backend_create_detokenizer_link=False and offline_mode=False")


class ChildSetup(msgspec.Struct, frozen=True):
    """The first line that a child reads from its standard input."""

    model_name: str
    """what clients call the model"""
    settings: dict[str, Any]
    """the fields of SchedulerConfig; `model_path` is a directory"""
    step_timeout: float
    """seconds; 0 is STEP_TIMEOUT_S of the device"""
    heartbeat_fd: int = -1
    """file descriptor of the memory for signs of life"""
    workers: list[str] = []
    """names of all children, in the order of their places in that memory"""
    place: int = 0
    """this child's place among them"""
    num_tokenizer: int = 0
    """processes that only tokenize"""
    number: int = 0
    """of such a process, from 1"""
    report_fd: int = -1
    """file descriptor on which it reports"""
    listen_fd: int = -1
    """file descriptor of the listening TCP socket; the API's alone"""
    http: HttpOptions = HttpOptions()
    """of the server; the API's alone"""

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(**{**self.settings, "tp_info": DistributedInfo(**self.settings["tp_info"])})


def settings_of(config: SchedulerConfig, rank: int = 0) -> dict[str, Any]:
    """The fields of `config` for one rank as plain JSON values; the inverse of `ChildSetup.config`."""
    return asdict(replace(config, tp_info=DistributedInfo(rank, config.tp_info.size)))
