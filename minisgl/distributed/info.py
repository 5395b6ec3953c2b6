"""Which of how many equal ranks this process is. A value; knows no process group and does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DistributedInfo:
    """Rank `rank` of `size` ranks. Raises ConfigError (a ValueError) unless both are integers and 0 <= rank < size."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        for name in ("rank", "size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name}: {value!r} found; an integer is wanted")
        if self.size < 1:
            raise ConfigError(f"{self.size} ranks found; at least 1 is allowed, change --tp")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} found; with {self.size} ranks 0 to {self.size - 1} are allowed")

    def is_primary(self) -> bool:
        """True for the rank that speaks with the tokenizer side."""
        return self.rank == 0
