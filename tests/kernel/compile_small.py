"""Compile the small kernels for sm_90 on a machine without a GPU: `python -m tests.kernel.compile_small` prints one JSON line a kernel.

A program of its own, since the test process has Triton's interpreter switched on. The launches are those of the real wrappers: a
recorder stands in the kernel's place and compiles what it is called with.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minisgl.kernel.gpu import activation, adjust, filter, inputs, norm, rope, sampling
from tests.kernel.compile_attention import TYPES, disassemble, usage_of

VOCAB_SIZE, NUM_IDS = 151_936, 151_669


@dataclass(frozen=True)
class Model:
    hidden: int
    num_heads: int
    intermediate: int
    num_kv_heads: int = 8
    head_dim: int = 128


MODELS = {"0.6B": Model(1024, 16, 3072), "14B": Model(5120, 40, 17408)}


class Recorder:
    """Compiles instead of launching; every tensor counts as aligned to 16 bytes."""

    def __init__(self, module, name):
        self.launcher = getattr(module, name)
        self.kernel = self.launcher.kernel
        setattr(module, name, self)
        self.compiled = None

    def prepare(self, *constants, **options):
        return lambda grid, *values: self(grid, *values, *constants, **options)

    def __call__(self, grid, *args, num_warps=4, launch_pdl=False, PDL=False, **options):
        signature, constants, attrs = {}, {}, {}
        for i, (parameter, arg) in enumerate(zip(self.kernel.params, (*args, PDL), strict=True)):
            if parameter.is_constexpr:
                signature[parameter.name], constants[(i,)] = "constexpr", arg
            elif isinstance(arg, torch.Tensor):
                signature[parameter.name], attrs[(i,)] = TYPES[arg.dtype], [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(arg, float) else "i32"
        source = ASTSource(self.kernel, signature, constants, attrs)
        self.compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "launch_pdl": launch_pdl, **options}
        )


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def compile_model(name, model):
    recorder = Recorder(norm, "_rms_norm_kernel")
    x, gain = tensor(4, model.hidden), tensor(model.hidden)
    norm.rms_norm(x, gain, 1e-6)
    yield f"rms_norm {name}", recorder.compiled
    norm.add_rms_norm(x, x, gain, 1e-6)
    yield f"add_rms_norm {name}", recorder.compiled
    norm._rms_norm_kernel = recorder.launcher

    recorder = Recorder(activation, "_silu_mul_kernel")
    activation.silu_mul(tensor(4, 2 * model.intermediate))
    yield f"silu_mul {name}", recorder.compiled
    activation._silu_mul_kernel = recorder.launcher

    recorder = Recorder(rope, "_rope_and_store_kernel")
    qkv, angles = tensor(4, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim), tensor(4, model.head_dim // 2)
    pool, gain = tensor(2, model.num_kv_heads, 64, model.head_dim), tensor(model.head_dim)
    rope.rope_and_store(qkv, angles, angles, (gain, gain, 1e-6), pool, pool, tensor(4, dtype=torch.int32))
    yield f"rope_and_store {name}", recorder.compiled
    rope._rope_and_store_kernel = recorder.launcher


def compile_others(recorder, workspace):
    """What rows need that want more than temperature; adjusted logits are fp32."""
    limits_recorder = Recorder(filter, "_limits_kernel")
    numbers, floats = tensor(4, dtype=torch.int32), tensor(4, dtype=torch.float32)
    tokens = seeds = tensor(4, dtype=torch.int64)
    filters = filter.Filters(numbers, floats, numbers, floats, floats)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        sampling.resample(tokens, tensor(4, VOCAB_SIZE, dtype=dtype), numbers, numbers, filters, seeds, NUM_IDS, workspace)
        yield f"resample {name}", recorder.compiled
        yield f"limits {name}", limits_recorder.compiled

    adjust_recorder, bias_recorder, note_recorder = (Recorder(adjust, f"_{name}_kernel") for name in ("adjust", "bias", "note"))
    wishes = adjust.Wishes(numbers, floats, floats, floats, numbers, numbers)
    biases = tensor(5, 1024, dtype=torch.int32), tensor(5, 1024, dtype=torch.float32)
    said = adjust.Said(tensor(5, -(-NUM_IDS // 16) * 16, dtype=torch.int32), *biases)
    adjust.adjust(tensor(4, VOCAB_SIZE), numbers, numbers, wishes, said)
    adjust.note(said.tokens, numbers, tokens)
    yield "adjust", adjust_recorder.compiled
    yield "bias", bias_recorder.compiled
    yield "note", note_recorder.compiled


def compile_common():
    recorder = Recorder(sampling, "_sample_kernel")
    slots, seeds = tensor(4, dtype=torch.int32), tensor(4, dtype=torch.int64)
    workspace = sampling.make_workspace(4, NUM_IDS, torch.device("cpu"))
    sampling.sample(tensor(4, VOCAB_SIZE), tensor(4, dtype=torch.float32), seeds, slots, NUM_IDS, workspace, slots)
    yield "sample", recorder.compiled
    yield from compile_others(recorder, workspace)

    recorder = Recorder(inputs, "_decode_inputs_kernel")
    inputs.decode_inputs(tensor(6, 256, dtype=torch.int32), seeds, 4)
    yield "decode_inputs", recorder.compiled
    recorder = Recorder(inputs, "_update_page_table_kernel")
    inputs.update_page_table(tensor(8, 640, dtype=torch.int32), tensor(256, 3, dtype=torch.int32), slots)
    yield "update_page_table", recorder.compiled
    recorder = Recorder(inputs, "_remember_kernel")
    inputs.remember(seeds, slots, seeds)
    yield "remember", recorder.compiled


def main():
    """Resources, and instructions by name and width."""
    models = itertools.chain.from_iterable(itertools.starmap(compile_model, MODELS.items()))
    compiled = {name: each.asm["cubin"] for name, each in itertools.chain(models, compile_common())}
    cubins = list(compiled.values())
    for name, cubin, words in zip(compiled, cubins, disassemble(cubins, 90), strict=True):
        counts = Counter(word for word in words if re.match(r"LDG|STG|LDL|STL|MUFU|ATOM", word))
        sys.stdout.write(json.dumps({"name": name, **usage_of(cubin), "instructions": len(words), **counts}) + "\n")


if __name__ == "__main__":
    main()
