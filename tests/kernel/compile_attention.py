"""Compile the attention kernels on a machine without a GPU: `python compile_attention.py CASE...` prints one JSON line a case.

For sm_90, or for what follows an @: `decode@86,...` is for sm_86.

A program of its own, since the test process has Triton's interpreter switched on. The launches are those of the real wrappers: a
recorder stands in the kernel's place and compiles what it is called with.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.kernel.gpu import decode_attention as decode
from minisgl.kernel.gpu import prefill_attention as prefill
from minisgl.kernel.gpu.pdl import pdl_options

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
SHARED_BYTES = {86: 99 * 1024, 90: 227 * 1024}
"""What a program may take on a GPU of that kind."""
INSTRUCTION_BYTES = 16
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def type_of(argument):
    """A kernel argument's type in Triton's notation; None is a constant."""
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{TYPES[argument.base.dtype][1:]}{list(argument.block_shape)}>"
    return TYPES[argument.dtype] if isinstance(argument, torch.Tensor) else "i32"


class Recorder:
    """Compiles instead of launching; tensors count as aligned to 16 bytes unless the kernel does not ask."""

    def __init__(self, kernel, arch):
        self.kernel, self.arch, self.compiled = kernel, arch, None

    def prepare(self, *constants, **options):
        return lambda grid, *values: self(grid, *values, *constants, **options)

    def __call__(self, grid, *args, **constants):
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        names = self.kernel.arg_names[: len(args)]
        signature = {n: type_of(a) for n, a in zip(names, args, strict=True)}
        constants.update({n: None for n, a in zip(names, args, strict=True) if a is None})
        signature.update(dict.fromkeys(constants, "constexpr"))
        is_aligned = {p.name: not p.do_not_specialize_on_alignment for p in self.kernel.params}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, (n, a) in enumerate(zip(names, args, strict=True))
            if isinstance(a, torch.Tensor) and is_aligned[n]
        }
        source = ASTSource(self.kernel, signature, constants, attrs)
        self.compiled = triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options)


def run(tool, *flags, content):
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return subprocess.run([BIN / tool, *flags, file.name], capture_output=True, text=True, check=True).stdout


def code_of(cubin):
    """The instructions of the one kernel of an ELF file."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * number) for number in range(count)]
    (found,) = [header for header in headers if cubin.startswith(b".text.", headers[names][4] + header[0])]
    return cubin[found[4] : found[4] + found[5]]


def disassemble(cubins, arch):
    """The names of the instructions of each. All in one run, for the disassembler takes most of a second to start."""
    codes = [code_of(cubin) for cubin in cubins]
    sass = run("nvdisasm", "-ndf", "--binary", f"SM{arch}{'a' * (arch == 90)}", content=b"".join(codes))
    words = iter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", sass, re.MULTILINE))
    found = [list(itertools.islice(words, len(code) // INSTRUCTION_BYTES)) for code in codes]
    assert [len(each) * INSTRUCTION_BYTES for each in found] == [len(code) for code in codes]
    assert next(words, None) is None
    return found


def usage_of(cubin):
    """Registers of a thread, and bytes of its stack."""
    usage = run("cuobjdump", "-res-usage", content=cubin)
    return {key: int(re.search(rf"{name}:(\d+)", usage).group(1)) for key, name in (("registers", "REG"), ("stack", "STACK"))}


def facts(compiled, arch=90):
    """What the test asserts of each: resources and the instructions that count."""
    cubins = [each.asm["cubin"] for each in compiled]
    found = []
    for each, cubin, words in zip(compiled, cubins, disassemble(cubins, arch), strict=True):
        counts = {name: sum(w.split(".")[0] == name for w in words) for name in ("HGMMA", "HMMA", "LDGSTS", "UTMALDG", "LDG", "STL", "LDL")}
        found.append({**counts, **usage_of(cubin), "shared_bytes": each.metadata.shared, "instructions": len(words)})
    return found


def compile_decode(arch, num_heads, num_kv_heads, head_dim, page_size, num_rows, dtype=torch.bfloat16, config=None):
    decode._prepared.cache_clear()
    decode._decode_kernel = recorder = Recorder(KERNELS["decode"], arch)
    decode.pdl_options = pdl_options if arch >= 90 else lambda: {"PDL": False}
    q = torch.empty(num_rows, num_heads, head_dim, dtype=dtype)
    pool = torch.empty(2, num_kv_heads, page_size, head_dim, dtype=dtype)
    numbers = torch.zeros(4, dtype=torch.int32)
    work = decode.DecodeWork(numbers, numbers, numbers, torch.zeros(8, 2, dtype=torch.int32), numbers[:1])
    partials = decode.make_partials(8, 4, num_kv_heads, num_heads // num_kv_heads, head_dim, q.device)
    decode.decode_attention(q, pool, pool, torch.zeros(4, 8, dtype=torch.int32), work, partials, None, config)
    return recorder.compiled


def compile_form(arch, form, *numbers):
    return compile_decode(arch, 16, 8, 128, 64, 256, config=decode.DecodeConfig(*map(int, numbers), form=form))


def compile_prefill(arch, num_heads, num_kv_heads, head_dim, page_size, dtype=torch.bfloat16):
    prefill._prepared.cache_clear()
    prefill._prefill_kernel = recorder = Recorder(KERNELS["prefill"], arch)
    q = torch.empty(300, num_heads, head_dim, dtype=dtype)
    pool = torch.empty(6, num_kv_heads, page_size, head_dim, dtype=dtype)
    lens = np.array([0], dtype=np.int32), np.array([300], dtype=np.int32)
    config = prefill.prefill_config(head_dim, dtype, SHARED_BYTES[arch])
    rows = prefill.PrefillRows(*(torch.zeros(1, dtype=torch.int32) for _ in range(4)))
    tiles = torch.from_numpy(prefill.plan_prefill(*lens, config.block_m))
    prefill.prefill_attention(q, pool, pool, torch.zeros(4, 8, dtype=torch.int32), rows, tiles, None, config)
    return recorder.compiled


KERNELS = {"decode": decode._decode_kernel.kernel, "prefill": prefill._prefill_kernel.kernel}
COMPILERS = {"decode": compile_decode, "prefill": compile_prefill, "form": compile_form}


def value_of(word):
    """A number, a torch.dtype, or the word itself."""
    return int(word) if word.isdigit() else getattr(torch, word) if word in ("float32", "float16") else word


def main():
    compiled = {}
    for case in sys.argv[1:]:
        kind, *words = case.split(",")
        kind, _, arch = kind.partition("@")
        compiled.setdefault(int(arch or 90), {})[case] = COMPILERS[kind](int(arch or 90), *map(value_of, words))
    for arch, cases in compiled.items():
        for case, found in zip(cases, facts(list(cases.values()), arch), strict=True):
            sys.stdout.write(json.dumps({"case": case, **found}) + "\n")


if __name__ == "__main__":
    main()
