"""What `minisgl serve` is told: a frozen value. Made by the command line, read by the launcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.engine.config import check_count, check_text
from minisgl.errors import ConfigError
from minisgl.processes.run_files import MAX_TOKENIZERS
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server.http_options import HttpOptions, check_seconds

__all__ = ["ServerOptions"]


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
    """Seconds after which a step counts as stuck; 0 is processes.setup.STEP_TIMEOUT_S of the device."""
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
