"""What `minisgl serve` is told, and the same as the launcher hands it to its children. Frozen values; JSON on the way."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from minisgl.distributed.info import DistributedInfo
from minisgl.errors import ConfigError
from minisgl.scheduler.config import SchedulerConfig
from minisgl.utils.run_dir import ipc_path

__all__ = ["ChildSetup", "ServerOptions", "remove_sockets"]


@dataclass(frozen=True)
class ServerOptions:
    """Settings of one server. Raises ConfigError for a combination that no server could honour."""

    scheduler: SchedulerConfig
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 1919
    """TCP port to listen on; 0 is any free one."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port: {self.port} found; 0 to 65535 is allowed")
        if self.scheduler.tp_info.size != 1:
            raise ConfigError(f"--tp: {self.scheduler.tp_info.size} found; tensor parallelism is not supported yet, only 1 is allowed")
        if self.scheduler.backend_create_detokenizer_link or self.scheduler.offline_mode:
            raise ConfigError("a server's SchedulerConfig wants backend_create_detokenizer_link=False and offline_mode=False")


class ChildSetup(msgspec.Struct, frozen=True):
    """The first line that a child reads from its standard input."""

    report_fd: int
    """file descriptor on which it reports"""
    listen_fd: int
    """file descriptor of the listening TCP socket"""
    model_name: str
    """what clients call the model"""
    settings: dict[str, Any]
    """the fields of SchedulerConfig; `model_path` is a directory"""

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(**{**self.settings, "tp_info": DistributedInfo(**self.settings["tp_info"])})


def settings_of(config: SchedulerConfig) -> dict[str, Any]:
    """The fields of `config` as plain JSON values; the inverse of `ChildSetup.config`."""
    return asdict(config)


def remove_sockets(config: SchedulerConfig) -> None:
    """Remove the files of this server's sockets, whoever made them; only when all of its processes are gone or about to go."""
    for address in (config.zmq_backend_addr, config.zmq_detokenizer_addr, config.zmq_scheduler_broadcast_addr, config.zmq_frontend_addr):
        ipc_path(address).unlink(missing_ok=True)
    config.rendezvous_path.unlink(missing_ok=True)
