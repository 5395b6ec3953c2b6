"""Time of one layer's mixture of experts on a GPU, by graph replay, beside the torch backend and the floor of its bytes and flops.

    python benchmark/gpu/moe.py [--out FILE.json] [--sweep] [--tokens N ...]

The shapes are Qwen3-30B-A3B's: hidden 2048, 128 experts of width 768, 8 per token. Prints microseconds of a layer from router logits to
the sum, of its parts, and the floor: the larger of the bytes that must move (matrices of the experts that were chosen, once; every pair's
values once in and once out) at the copy bandwidth, and the flops at the dense rate. Each graph goes through several layers' matrices, so
that no cache holds them. The torch backend waits for the device and cannot be captured: it is timed as called. `differs` is the largest
difference from the torch backend, relative to the largest value. With `--sweep` other configurations of the grouped products are timed,
which takes a minute or two to compile.
`--dry-run` calls everything once on tiny shapes, on whatever device there is. Without a GPU that is Triton's interpreter, with the tests'
repairs installed before this file is run; nothing is timed then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from minisgl.kernel.gpu import moe
from minisgl.kernel.gpu.moe import MoEKernelConfig
from minisgl.moe import moe_backend

H200_SHARED_BYTES = 227 * 1024

COPY_BANDWIDTH = 4.29e12
"""bytes per second of an H200, measured with a device-to-device copy, reads and writes counted"""
DENSE_RATE = 790e12
"""bf16 flops per second of an H200, measured with large products"""
NUM_REPLAYS = 5
TORCH_SECONDS = 1.0
"""Time given to the torch backend per row."""
SWEEP = {
    16: [
        (64, 64, 5, 4),
        (64, 128, 3, 4),
        (64, 128, 4, 4),
        (64, 128, 5, 4),
        (64, 256, 3, 4),
        (128, 64, 4, 4),
        (128, 128, 3, 4),
        (128, 128, 3, 8),
    ],
    32: [(64, 64, 4, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 3, 4), (256, 64, 3, 8)],
    64: [(64, 64, 4, 4), (64, 128, 3, 4), (128, 64, 3, 4), (128, 64, 4, 4), (128, 128, 3, 8), (256, 64, 3, 8)],
    128: [(64, 64, 4, 4), (128, 64, 3, 4), (128, 64, 4, 8), (256, 64, 3, 8), (256, 64, 4, 8)],
}
"""block_m -> block_n, block_k, stages, warps"""


@dataclass(frozen=True)
class Shape:
    hidden: int
    width: int
    num_experts: int
    num_chosen: int
    num_layers: int
    """sets of matrices in turn"""


@dataclass(frozen=True)
class Layer:
    """What one layer reads."""

    gate_up: torch.Tensor
    down: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def time_us(run: Callable[[Layer], object], layers: list[Layer], device: torch.device) -> float:
    """Microseconds of one layer, in a graph over all of them."""
    run(layers[0])
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            run(layer)
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(layers))
    return statistics.median(times)


def time_called_us(run: Callable[[Layer], object], layers: list[Layer], device: torch.device) -> float:
    """Microseconds of one layer, called again and again for about TORCH_SECONDS; ends with the device."""
    run(layers[0])
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < TORCH_SECONDS:
        run(layers[count % len(layers)])
        torch.cuda.synchronize()
        count += 1
    return (time.perf_counter() - started) / count * 1e6


def make_layers(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device, dtype=dtype).mul_(sizes[-1] ** -0.5)

    gate_up, down = (shape.num_experts, 2 * shape.width, shape.hidden), (shape.num_experts, shape.hidden, shape.width)
    return [(noise(*gate_up), noise(*down)) for _ in range(shape.num_layers)]


def routed(shape: Shape, num_tokens: int, matrices: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Layer]:
    """Each layer with a router of its own."""
    layers = []
    for gate_up, down in matrices:
        logits = torch.randn(num_tokens, shape.num_experts, device=down.device, dtype=down.dtype)
        layers.append(Layer(gate_up, down, logits, *moe.route(logits, shape.num_chosen, True)))
    return layers


def floor_us(shape: Shape, num_tokens: int, layers: list[Layer]) -> tuple[float, float]:
    """Microseconds that a layer's bytes and its flops take."""
    used = statistics.mean(int(layer.ids.unique().numel()) for layer in layers)
    matrix, pairs = 3 * shape.width * shape.hidden, num_tokens * shape.num_chosen
    values = used * matrix + 2 * num_tokens * shape.hidden + 2 * pairs * (shape.width + shape.hidden)
    return values * layers[0].down.element_size() / COPY_BANDWIDTH * 1e6, 2 * pairs * matrix / DENSE_RATE * 1e6


def difference(own: torch.Tensor, other: torch.Tensor) -> float:
    return float((own.double() - other.double()).abs().max() / other.double().abs().max())


def measure(shape: Shape, num_tokens: int, matrices: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> dict[str, object]:
    dtype = matrices[0][0].dtype
    x = torch.randn(num_tokens, shape.hidden, device=device, dtype=dtype)
    layers = routed(shape, num_tokens, matrices)
    plain = moe_backend("torch")

    def whole(layer: Layer) -> torch.Tensor:
        return moe.experts(x, layer.gate_up, layer.down, *moe.route(layer.logits, shape.num_chosen, True))

    def by_torch(layer: Layer) -> torch.Tensor:
        return plain.experts(x, layer.gate_up, layer.down, *plain.route(layer.logits, shape.num_chosen, True))

    config = moe.moe_config(num_tokens * shape.num_chosen, shape.num_experts, dtype, H200_SHARED_BYTES)
    bytes_us, flops_us = floor_us(shape, num_tokens, layers)
    found = {
        "tokens": num_tokens,
        "config": asdict(config),
        "us": time_us(whole, layers, device),
        "route_us": time_us(lambda layer: moe.route(layer.logits, shape.num_chosen, True), layers, device),
        "experts_us": time_us(lambda layer: moe.experts(x, layer.gate_up, layer.down, layer.weights, layer.ids), layers, device),
        "torch_us": time_called_us(by_torch, layers, device),
        "bytes_us": bytes_us,
        "flops_us": flops_us,
        "differs": difference(whole(layers[0]), by_torch(layers[0])),
    }
    share = max(bytes_us, flops_us) / found["us"] if found["us"] else 0.0
    print(
        f"T={num_tokens:<5} {found['us']:9.1f} us (route {found['route_us']:.1f}, experts {found['experts_us']:.1f})  "
        f"floor: bytes {bytes_us:.1f}, flops {flops_us:.1f}: {share:.0%}  torch {found['torch_us']:.0f} us  differs {found['differs']:.1e}",
        flush=True,
    )
    return found


def sweep(
    shape: Shape, num_tokens: int, matrices: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> list[dict[str, object]]:
    """The experts without the router in each configuration whose blocks are near the default's; the fastest first."""
    dtype = matrices[0][0].dtype
    num_pairs = num_tokens * shape.num_chosen
    x = torch.randn(num_tokens, shape.hidden, device=device, dtype=dtype)
    layers = routed(shape, num_tokens, matrices)
    default = moe.moe_config(num_pairs, shape.num_experts, dtype, H200_SHARED_BYTES)
    found = []
    for block_m, others in SWEEP.items():
        if not default.block_m // 2 <= block_m <= default.block_m * 2:
            continue
        for other in others:
            config = MoEKernelConfig(block_m, *other)

            def run(layer: Layer, config: MoEKernelConfig = config) -> torch.Tensor:
                return moe.experts(x, layer.gate_up, layer.down, layer.weights, layer.ids, config=config)

            try:
                us = time_us(run, layers, device)
            except triton.runtime.errors.OutOfResources as error:
                print(f"  {config}: {error}", flush=True)
                continue
            found.append({"tokens": num_tokens, "config": asdict(config), "experts_us": us, "is_default": config == default})
    found.sort(key=lambda entry: float(str(entry["experts_us"])))
    for entry in found:
        numbers = "x".join(str(value) for value in entry["config"].values())  # type: ignore[attr-defined]
        print(f"  T={num_tokens:<5} {numbers:18} {entry['experts_us']:9.1f} us{'  default' if entry['is_default'] else ''}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 256, 2048], help="tokens of a step")
    parser.add_argument("--sweep", action="store_true", help="time other configurations too")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, each called once")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if options.dry_run else torch.bfloat16
    shape = Shape(64, 48, 8, 2, 2) if options.dry_run else Shape(2048, 768, 128, 8, 6)
    torch.manual_seed(0)
    matrices = make_layers(shape, dtype, device)
    tokens = [1, 20] if options.dry_run else options.tokens
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": asdict(shape),
        "figures": [measure(shape, num_tokens, matrices, device) for num_tokens in tokens],
    }
    if options.sweep:
        report["sweep"] = [entry for num_tokens in tokens for entry in sweep(shape, num_tokens, matrices, device)]
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
