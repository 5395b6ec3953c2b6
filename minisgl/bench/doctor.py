"""`minisgl doctor [MODEL]`: what is installed, which devices and attention backends can be used, and how a model would fit the memory.

Reads a model's config only, never its weights. Prints; decides nothing for the engine.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.bench.machine import OPTIONAL, REQUIRED, hardware, installed
from minisgl.engine.config import EngineConfig
from minisgl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from minisgl.models.config import ModelConfig

__all__ = ["Backend", "ModelPlan", "add_arguments", "main", "plan_model", "probe_backends"]

MIB = 2**20


@dataclass(frozen=True)
class Backend:
    """An attention backend and why it cannot be used here (None: it can)."""

    name: str
    why_not: str | None


@dataclass(frozen=True)
class ModelPlan:
    """How a model would fit this machine."""

    architecture: str
    dtype: str
    device: str
    weight_bytes: int
    kv_bytes_per_token: int
    available_bytes: int
    """free memory before anything is loaded"""
    page_size: int
    """tokens"""
    num_pages: int
    """0: nothing fits, see `problem`"""
    max_seq_len: int
    """tokens of the longest sequence"""
    problem: str | None = None

    @property
    def num_tokens(self) -> int:
        """tokens that the KV pool holds"""
        return self.num_pages * self.page_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this program; those of the engine come from the command line."""
    text = "directory of a model, a .gguf file, or a name on the hub, whose memory plan is wanted; without one, none is made"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)


def main(config: EngineConfig | None) -> int:
    """Print the report; with a config, also the memory plan of its model. 0, or 1 if something is missing or does not fit."""
    is_whole = _print_packages()
    _print_devices()
    print("attention backends")
    for backend in probe_backends():
        print(f"  {backend.name:<20} {'usable' if backend.why_not is None else f'not usable: {backend.why_not}'}")
    if config is None:
        return 0 if is_whole else 1
    plan = plan_model(config)
    _print_plan(config, plan)
    return 0 if is_whole and plan.problem is None else 1


def _print_packages() -> bool:
    """False if a required one is missing."""
    print("packages")
    for name in REQUIRED:
        print(f"  {name:<20} {installed(name) or 'MISSING: pip install ' + name}")
    for name, purpose in OPTIONAL.items():
        print(f"  {name:<20} {installed(name) or f'not installed ({purpose})'}")
    return all(installed(name) is not None for name in REQUIRED)


def _print_devices() -> None:
    machine = hardware()
    print("devices")
    print(
        f"  cpu                  {machine['cpu']}, {machine['num_cpus']} cores usable, torch uses {machine['num_threads']} threads, "
        f"{machine['memory_bytes'] / MIB:,.0f} MiB"
    )
    for index, gpu in enumerate(machine["gpus"]):
        print(f"  cuda:{index:<15} {gpu['name']}, {gpu['memory_bytes'] / MIB:,.0f} MiB, compute capability {gpu['capability']}")
    if not machine["gpus"]:
        why = "torch is built without CUDA" if machine["cuda"] is None else f"torch is built for CUDA {machine['cuda']} and finds no GPU"
        print(f"  cuda                 none: {why}")


def probe_backends() -> list[Backend]:
    """Every registered backend, tried on the device that would be chosen."""
    import torch

    from minisgl.attention import ATTENTION_BACKENDS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [Backend(name, _why_not(name, device)) for name in sorted(ATTENTION_BACKENDS)]


def _why_not(name: str, device: torch.device) -> str | None:
    """Attend with one head; the reason if that fails."""
    import torch

    from minisgl.attention import make_attention_backend
    from minisgl.attention.probe import TRIAL_PAGES, why_not
    from minisgl.kvcache.pool import make_kv_pool

    page_size, head_dim = (16, 64) if device.type == "cpu" else (64, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        pool = make_kv_pool(1, TRIAL_PAGES, 1, page_size, head_dim, dtype, device)
        return why_not(make_attention_backend(name, pool, torch.zeros((2, 1), dtype=torch.int32, device=device)), 1)
    except Exception as error:  # whatever a library raises is what is to be reported
        return f"{type(error).__name__}: {error}"


def plan_model(config: EngineConfig) -> ModelPlan:
    """What the engine would decide for `config` now, without loading weights. Raises ConfigError and ModelFormatError like the engine."""

    from minisgl.engine.engine import DEFAULT_PAGE_SIZE, choose_device, choose_dtype, choose_max_seq_len
    from minisgl.engine.memory import available_bytes, plan_memory
    from minisgl.kvcache.pool import bytes_per_page
    from minisgl.models.config import load_model_config
    from minisgl.models.resolve import resolve_model

    model = load_model_config(resolve_model(config.model_path))
    device = choose_device(config)
    dtype = choose_dtype(config, model, device)
    page_size = config.page_size or DEFAULT_PAGE_SIZE[device.type]
    weight_bytes, available = _weight_bytes(model, dtype, device), available_bytes(device)
    attention = model.attention
    page_bytes = bytes_per_page(model.num_layers, attention.num_kv_heads, page_size, attention.head_dim, dtype)
    num_pages, problem = 0, None
    try:
        num_pages = plan_memory(config, model, dtype, page_size, available, weight_bytes, device.type).num_pages
    except ConfigError as error:
        problem = str(error)
    return ModelPlan(
        architecture=model.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=page_bytes // page_size,
        available_bytes=available,
        page_size=page_size,
        num_pages=num_pages,
        max_seq_len=choose_max_seq_len(config, model),
        problem=problem,
    )


def _weight_bytes(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of all parameters, from their shapes."""
    import torch

    from minisgl.engine.config import ONE_RANK
    from minisgl.kernel.packed import can_pack
    from minisgl.layers.base import Spec
    from minisgl.models.decoder import CausalLM

    return CausalLM(model, Spec(dtype, torch.device("meta"), ONE_RANK)).num_bytes(can_pack(dtype, device))


def _print_plan(config: EngineConfig, plan: ModelPlan) -> None:
    print("memory plan")
    print(f"  model                {config.model_path} ({plan.architecture}), {plan.dtype} on {plan.device}")
    print(f"  available            {plan.available_bytes / MIB:,.0f} MiB")
    print(f"  weights              {plan.weight_bytes / MIB:,.0f} MiB")
    print(f"  KV per token         {plan.kv_bytes_per_token:,} bytes")
    print(f"  longest sequence     {plan.max_seq_len:,} tokens")
    if plan.problem is not None:
        print(f"  does not fit: {plan.problem}")
        return
    pool = plan.num_tokens * plan.kv_bytes_per_token / MIB
    print(f"  KV pool              {pool:,.0f} MiB: {plan.num_tokens:,} tokens in {plan.num_pages:,} pages of {plan.page_size}")
    if plan.num_tokens < plan.max_seq_len:
        print(f"  one request is limited to {plan.num_tokens:,} tokens by the pool")
