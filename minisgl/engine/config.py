"""What an engine is told: which model, on what device, with how much memory. A frozen value.

Constructing one touches neither disk nor model nor device, and does not import torch. Whatever is left to the machine (0 or "auto") is
decided by the engine at start. Changed with `dataclasses.replace`; no other process or module rewrites it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from minisgl.distributed.info import DistributedInfo
from minisgl.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_EXTEND_TOKENS = {"cpu": 256, "cuda": 8192}
ONE_RANK = DistributedInfo(0, 1)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one rank's engine. Raises ConfigError for a value that no engine could honour."""

    model_path: str | None = None
    """Directory of the model or its name on the hub; None is the embedded model."""
    tp_info: DistributedInfo = ONE_RANK
    """This rank and the number of ranks that share the model."""
    dtype: Any = "auto"
    """Type of weights, K/V and activations: a name of DTYPES or the torch.dtype of that name; reads as the name. "auto" is the
    checkpoint's own on CUDA and float32 on a CPU."""
    device: str = "auto"
    """One of DEVICES. "auto" is CUDA where there is a GPU, otherwise the CPU."""
    page_size: int = 0
    """Tokens in a page of the KV pool; 0 is 16 on a CPU and 64 on CUDA."""
    num_pages: int = 0
    """Pages in the KV pool; 0 is what the memory that is left after the weights holds."""
    max_running_req: int = 256
    """Most requests that run at the same time."""
    max_seq_len: int = 0
    """Most tokens of one request, prompt and output together; 0 is the model's context."""
    max_extend_tokens: int = 0
    """Most new tokens of one step, longer prompts are computed in chunks; 0 is 8192 on CUDA and 256 on a CPU, and for `LLM` with one GPU of
    128 GiB or more 16384."""
    cuda_graph_max_bs: int = 256
    """Decode steps of at most so many rows are CUDA graphs; 0: none is, nor a prefill step. Without effect on a CPU."""
    attention_backend: str = "auto"
    """A name in the registry of attention backends, which also checks it, or two, "PREFILL,DECODE"; "auto" is the best that runs here."""
    use_dummy_weight: bool = False
    """Fill the weights from `seed` and read no weight file: for measuring, the text is noise."""
    seed: int = 0
    """Seed of the dummy weights, 0 to 2**63 - 1. No request's noise comes from it."""
    memory_ratio: float = 0.0
    """Share of the device's available memory that weights and KV pool may take together, at most 1; 0 is 0.9 on CUDA, 0.3 on a CPU."""

    def __post_init__(self) -> None:
        if self.model_path is not None:
            check_text("model_path", self.model_path, "--model")
        if not isinstance(self.tp_info, DistributedInfo):
            raise ConfigError(f"tp_info: {self.tp_info!r} found; a DistributedInfo(rank, size) is wanted")
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_choice("dtype", self.dtype, DTYPES, "--dtype")
        check_choice("device", self.device, DEVICES, "--device")
        check_count("page_size", self.page_size, 0, "--page-size")
        check_count("num_pages", self.num_pages, 0, "--num-pages")
        check_count("max_running_req", self.max_running_req, 1, "--max-running-requests")
        check_count("max_seq_len", self.max_seq_len, 0, "--max-seq-len")
        if self.max_seq_len == 1:
            raise ConfigError("max_seq_len: 1 found; a prompt and its answer need 2 tokens, or 0 for the context; change --max-seq-len")
        check_count("max_extend_tokens", self.max_extend_tokens, 0, "--max-extend-tokens")
        check_count("cuda_graph_max_bs", self.cuda_graph_max_bs, 0, "--cuda-graph-max-bs")
        check_text("attention_backend", self.attention_backend, "--attention-backend")
        check_flag("use_dummy_weight", self.use_dummy_weight, "--dummy-weight")
        check_count("seed", self.seed, 0, "--seed", high=2**63 - 1)
        ratio = self.memory_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
            raise ConfigError(f"memory_ratio: {ratio!r} found; 0 to 1 is allowed, change --memory-ratio")


def check_count(name: str, value: Any, low: int, flag: str, *, high: int = 2**31 - 1) -> None:
    """Raise ConfigError unless `value` is an int (no bool) with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}: {value!r} found; an integer from {low} to {high} is allowed, change {flag}")


def check_choice(name: str, value: Any, allowed: Container[Any], flag: str) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name}: {value!r} found; one of {allowed} is allowed, change {flag}")


def check_text(name: str, value: Any, flag: str) -> None:
    """Raise ConfigError unless `value` is a string of at least one character."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}: {value!r} found; a string of at least one character is wanted, change {flag}")


def check_flag(name: str, value: Any, flag: str) -> None:
    """Raise ConfigError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {value!r} found; True or False is wanted, change {flag}")
