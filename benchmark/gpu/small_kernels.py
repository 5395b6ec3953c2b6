"""Time of the small Triton kernels on a GPU, by graph replay, beside their torch twins; each is compared with its twin once.

    python benchmark/gpu/small_kernels.py [--out FILE.json]

Prints microseconds, GB/s (bytes that must move, over the time) and the largest difference from the twin, for one layer's shapes of
Qwen3-0.6B and 14B. For the sampler the difference is the share of rows whose token is another. `--dry-run` calls everything once on tiny
shapes, on whatever device there is: with TRITON_INTERPRET=1 on a CPU, where bfloat16 is wrong without the tests' repairs, so in fp32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from minisgl.kernel import reference
from minisgl.kernel.gpu import activation, inputs, norm, rope, sampling
from minisgl.kernel.sampling import sample_plainly

EPS = 1e-6
PAGE_SIZE = 64


@dataclass(frozen=True)
class Shape:
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int


MODELS = {"0.6B": Shape(1024, 16, 8, 128, 3072, 151_936), "14B": Shape(5120, 40, 8, 128, 17_408, 151_936)}
NUM_ROWS = (1, 8, 64, 256)
BLOCKS = (1024, 2048, 4096)


@dataclass(frozen=True)
class Case:
    """A kernel and its twin on the same inputs; both return what is to be compared."""

    name: str
    num_bytes: int
    kernel: Callable[[], list[torch.Tensor]]
    twin: Callable[[], list[torch.Tensor]]


def size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def layer_cases(shape: Shape, num_rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(dtype)

    x, residual, gain = noise(num_rows, shape.hidden), noise(num_rows, shape.hidden), noise(shape.hidden)
    yield Case("rms_norm", size(x, x, gain), lambda: [norm.rms_norm(x, gain, EPS)], lambda: [reference.rms_norm(x, gain, EPS)])
    yield Case(
        "add_rms_norm",
        size(x, x, x, x, gain),
        lambda: list(norm.add_rms_norm(x, residual, gain, EPS)),
        lambda: list(reference.add_rms_norm(x, residual, gain, EPS)),
    )
    gate_up = noise(num_rows, 2 * shape.intermediate)
    num_bytes = size(gate_up) * 3 // 2
    yield Case("silu_mul", num_bytes, lambda: [activation.silu_mul(gate_up)], lambda: [reference.silu_mul(gate_up)])
    yield rope_case(shape, num_rows, noise, device)


def rope_case(shape: Shape, num_rows: int, noise: Callable[..., torch.Tensor], device: torch.device) -> Case:
    num_turned, dim = shape.num_heads + shape.num_kv_heads, shape.head_dim
    qkv, angles = noise(num_rows, (num_turned + shape.num_kv_heads) * dim), noise(num_rows, dim // 2).float()
    cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
    q_gain, k_gain = noise(dim), noise(dim)
    pools, others = ([noise(num_rows + 1, shape.num_kv_heads, PAGE_SIZE, dim) * 0 for _ in range(2)] for _ in range(2))
    slots = torch.arange(num_rows, device=device) * (PAGE_SIZE + 1) % (num_rows * PAGE_SIZE)

    def fused() -> list[torch.Tensor]:
        return [rope.rope_and_store(qkv, cos, sin, (q_gain, k_gain, EPS), pools[0], pools[1], slots), *pools]

    def unfused() -> list[torch.Tensor]:
        q, k, v = qkv.view(num_rows, -1, dim).split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        turned = torch.cat((reference.rms_norm(q, q_gain, EPS), reference.rms_norm(k, k_gain, EPS)), dim=1)
        turned = reference.apply_rope(turned, cos, sin)
        reference.store_kv(others[0], turned[:, shape.num_heads :], slots)
        reference.store_kv(others[1], v, slots)
        return [turned[:, : shape.num_heads], *others]

    return Case("rope_and_store", 2 * size(qkv) + size(cos, sin, q_gain, k_gain, slots), fused, unfused)


def step_cases(vocab_size: int, num_rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """What runs once a step."""
    logits = (torch.randn(num_rows, vocab_size, device=device) * 3).to(dtype)
    seeds, positions = torch.arange(num_rows, device=device) * 12_345, torch.full((num_rows,), 77, device=device)
    for name, temperature in (("greedy", 0.0), ("sample", 0.8)):
        temperatures = torch.full((num_rows,), temperature, device=device)

        def twin(temperature: float = temperature) -> list[torch.Tensor]:
            return [sample_plainly(logits.float() / temperature, seeds, positions) if temperature else logits.argmax(-1)]

        for block in BLOCKS:
            workspace = sampling.make_workspace(num_rows, vocab_size, device, block)
            arguments = (logits, temperatures, seeds, positions, vocab_size, workspace)
            yield Case(f"{name} block {block}", size(logits), lambda arguments=arguments: [sampling.sample(*arguments)], twin)
    plan = torch.stack([torch.arange(num_rows), torch.full((num_rows,), -1), torch.arange(num_rows) + 9]).int().to(device)
    last_tokens, rows = torch.arange(num_rows, device=device) + 5, plan[0].long()
    yield Case(
        "decode_inputs",
        size(plan, last_tokens, rows, rows),
        lambda: list(inputs.decode_inputs(plan, last_tokens, num_rows)),
        lambda: [torch.where(plan[1] < 0, last_tokens[plan[0]], plan[1].long()), plan[2].long()],
    )
    tokens, remembered, others = rows * 3, torch.zeros_like(rows), torch.zeros_like(rows)

    def remember() -> list[torch.Tensor]:
        inputs.remember(remembered, plan[0], tokens)
        return [remembered]

    yield Case("remember", 2 * size(tokens) + size(plan[0]), remember, lambda: [others.index_copy_(0, rows, tokens.clamp(min=0))])


def largest_difference(case: Case) -> float:
    """Of floats the largest difference relative to the largest value; of integers the share of values that differ."""
    differences = []
    for own, other in zip(case.kernel(), case.twin(), strict=True):
        if own.is_floating_point():
            differences.append(float((own.double() - other.double()).abs().max() / other.double().abs().max()))
        else:
            differences.append(float((own != other).double().mean()))
    return max(differences)


def microseconds(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return float(triton.testing.do_bench_cudagraph(function, rep=20)) * 1e3
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e6


def measure(model: str, num_rows: int, case: Case, device: torch.device) -> dict[str, object]:
    difference = largest_difference(case)
    own, other = microseconds(case.kernel, device), microseconds(case.twin, device)
    speed = f"{own:9.2f} us {case.num_bytes / own / 1e3:8.1f} GB/s  twin {other:9.2f} us"
    print(f"{model:5} T={num_rows:<4} {case.name:18} {speed}  differs {difference:.1e}")
    return {
        "model": model,
        "rows": num_rows,
        "kernel": case.name,
        "us": own,
        "twin_us": other,
        "bytes": case.num_bytes,
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, each called once")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if options.dry_run else torch.bfloat16
    models = {"tiny": Shape(64, 4, 2, 16, 96, 1000)} if options.dry_run else MODELS
    torch.manual_seed(0)
    figures = []
    for num_rows in (2,) if options.dry_run else NUM_ROWS:
        for model, shape in models.items():
            figures += [measure(model, num_rows, case, device) for case in layer_cases(shape, num_rows, dtype, device)]
        vocab_size = next(iter(models.values())).vocab_size
        figures += [measure("step", num_rows, case, device) for case in step_cases(vocab_size, num_rows, dtype, device)]
    if options.out:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        versions = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
        shapes = {model: asdict(shape) for model, shape in models.items()}
        options.out.write_text(json.dumps({**versions, "shapes": shapes, "figures": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
