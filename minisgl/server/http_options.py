"""What one server allows over HTTP: limits, the key, the origins. Frozen values that know no server. Made by the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minisgl.engine.config import check_count
from minisgl.errors import ConfigError

__all__ = ["HttpOptions", "check_seconds"]

MIN_SECONDS = 0.001
MAX_SECONDS = 86_400.0


@dataclass(frozen=True)
class HttpOptions:
    """Each field has the flag of its name. Raises ConfigError for a value that no server could honour."""

    max_body_bytes: int = 16 * 2**20
    """Longest body of a request."""
    max_header_bytes: int = 16 * 2**10
    """Longest head of a request, its first line included."""
    max_waiting_requests: int = 1024
    """Most outputs (prompts times choices) that wait for their first token."""
    slow_reader_bytes: int = 2**20
    """Most bytes that wait for a client that does not keep up."""
    slow_reader_timeout: float = 60.0
    """Seconds in which a client that has something to read must read some of it."""
    header_timeout: float = 60.0
    """Seconds in which a request, head and body, must have arrived, counted from the connection or from its first byte."""
    request_timeout: float = 3600.0
    """Seconds in which a request must have been answered."""
    keep_alive_timeout: int = 120
    """Seconds that an idle connection stays open."""
    cors_origin: str = ""
    """Origins, with commas between them, whose pages may read answers; * is all, nothing is none."""
    api_key: str | None = field(default=None, repr=False)
    """What clients must show; None: nothing."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_header_bytes", "max_waiting_requests", "slow_reader_bytes", "keep_alive_timeout"):
            check_count(name, getattr(self, name), 1, _flag(name))
        for name in ("slow_reader_timeout", "header_timeout", "request_timeout"):
            check_seconds(name, getattr(self, name), _flag(name), low=MIN_SECONDS)
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.split() == [key]):
            raise ConfigError("the key is not printable ASCII without spaces, as a header must be; change --api-key or MINISGL_API_KEY")

    @property
    def origins(self) -> list[str]:
        """Those of `cors_origin`."""
        return [origin.strip() for origin in self.cors_origin.split(",") if origin.strip()]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_seconds(name: str, value: Any, flag: str, *, low: float = 0.0) -> None:
    """Raise ConfigError unless `value` is a number from `low` to a day."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= MAX_SECONDS:
        raise ConfigError(f"{name}: {value!r} found; {low:g} to {MAX_SECONDS:g} seconds are allowed, change {flag}")
