"""Matrix products on a GPU by a cuBLASLt algorithm that was measured to be faster than the library's own choice.

The library chooses by a model of its own; for some products by large matrices, a search among its algorithms finds a faster one, alone or
in a step of a model. `products.json` names them, for one kind of GPU and one version of the library; whatever it does not name is left to
torch. `benchmark/gpu/products.py` and `products_in_model.py` write it. Knows tensors only. Called by the layers.

Letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["ATTRIBUTES", "MAX_WORKSPACE", "Algorithm", "Product", "Result", "describe", "library", "product"]

logger = logging.getLogger(__name__)

BFLOAT16, FLOAT32, COMPUTE_FLOAT32 = 14, 0, 68
TRANSPOSE_FIRST = 3
ATTRIBUTES = (*(ctypes.c_int32, ctypes.c_uint32) * 2, *(ctypes.c_uint32,) * 3, *(ctypes.c_uint16,) * 2)
"""What names an algorithm, in the order of the library's numbers: its id, tile, parts of K, their reduction, order of the tiles, its own
option, stages, inner shape and cluster."""
MAX_WORKSPACE = 32 << 20
"""bytes"""


class Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Result(ctypes.Structure):
    """What the library says of an algorithm for a product."""

    _fields_ = (("algorithm", Algorithm), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int), ("others", ctypes.c_int * 5))


class Library:
    """cuBLASLt as torch has loaded it. Raises OSError where there is none."""

    def __init__(self) -> None:
        self._calls = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
        self._calls.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._calls.cublasLtGetVersion())
        self.handle = ctypes.c_void_p()
        self("Create", ctypes.byref(self.handle))

    def __call__(self, name: str, *arguments: Any) -> None:
        """RuntimeError if the library does not do it."""
        if status := getattr(self._calls, f"cublasLt{name}")(*arguments):
            raise RuntimeError(f"cublasLt{name} returned status {status}")


def _passed(value: Any) -> tuple[Any, ctypes.c_size_t]:
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))


library = functools.cache(Library)
"""The one of this process."""


def describe(num_tokens: int, num_outputs: int, num_inputs: int) -> tuple[ctypes.c_void_p, list[ctypes.c_void_p]]:
    """The library's descriptions of a product: of the operation, and of the weight, the inputs and the outputs."""
    operation = ctypes.c_void_p()
    library()("MatmulDescCreate", ctypes.byref(operation), COMPUTE_FLOAT32, FLOAT32)
    library()("MatmulDescSetAttribute", operation, TRANSPOSE_FIRST, *_passed(ctypes.c_int32(1)))
    # the library counts by columns: outputs [N, T] = weight [K, N] transposed times inputs [K, T]
    shapes = ((num_inputs, num_outputs), (num_inputs, num_tokens), (num_outputs, num_tokens))
    layouts = [ctypes.c_void_p() for _ in shapes]
    for layout, (height, width) in zip(layouts, shapes, strict=True):
        sizes = ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(height)
        library()("MatrixLayoutCreate", ctypes.byref(layout), BFLOAT16, *sizes)
    return operation, layouts


class Product:
    """x [T, K] times weight [N, K] transposed, in bfloat16, by one algorithm; RuntimeError if that cannot compute it."""

    def __init__(self, num_tokens: int, num_outputs: int, num_inputs: int, attributes: Sequence[int]) -> None:
        self._lib, self._num_outputs = library(), num_outputs
        self._operation, self._layouts = describe(num_tokens, num_outputs, num_inputs)
        self._algorithm = Algorithm()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._workspace = self._choose(*attributes)

    def _choose(self, name: int, *others: int) -> int:
        """Take the algorithm of that name; the bytes of memory that it wants."""
        algorithm = ctypes.byref(self._algorithm)
        self._lib("MatmulAlgoInit", self._lib.handle, COMPUTE_FLOAT32, FLOAT32, *(BFLOAT16,) * 4, name, algorithm)
        for number, (kind, value) in enumerate(zip(ATTRIBUTES[1:], others, strict=True), 1):
            if value:  # not every algorithm takes every attribute; zero is the default of each that may be zero
                self._lib("MatmulAlgoConfigSetAttribute", algorithm, number, *_passed(kind(value)))
        result, (weight, x, out) = Result(), self._layouts
        self._lib("MatmulAlgoCheck", self._lib.handle, self._operation, weight, x, out, out, algorithm, ctypes.byref(result))
        if result.workspace > MAX_WORKSPACE:
            raise RuntimeError(f"the algorithm wants {result.workspace} bytes of memory, {MAX_WORKSPACE} are allowed")
        return int(result.workspace)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Both contiguous, on the current device."""
        out = x.new_empty(len(x), self._num_outputs)
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=x.device)
        matrices = [(ctypes.c_void_p(t.data_ptr()), layout) for t, layout in zip((weight, x, out), self._layouts, strict=True)]
        terms = (ctypes.byref(self._one), *matrices[0], *matrices[1], ctypes.byref(self._zero), *matrices[2], *matrices[2])
        scratch, stream = ctypes.c_void_p(workspace.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        where = ctypes.byref(self._algorithm), scratch, ctypes.c_size_t(self._workspace), stream
        self._lib("Matmul", self._lib.handle, self._operation, *terms, *where)
        return out


@functools.cache
def _named(device: torch.device) -> dict[tuple[int, int, int], list[int]]:
    """(T, N, K) -> the algorithm's attributes; nothing for other GPUs and versions of the library than were measured."""
    table = json.loads(resources.files(__package__).joinpath("products.json").read_text(encoding="utf-8"))
    try:
        is_measured = torch.cuda.get_device_name(device) == table["device"] and library().version == table["cublaslt"]
    except (OSError, RuntimeError) as error:
        logger.warning("cuBLASLt cannot be used directly, matrix products are left to torch: %s", error)
        is_measured = False
    return {(tokens, outputs, inputs): name for tokens, outputs, inputs, *name in table["algorithms"] if is_measured}


@functools.cache
def _prepared(device: torch.device, sizes: tuple[int, int, int]) -> Product | None:
    """By the named algorithm; None if the library refuses it."""
    try:
        return Product(*sizes, _named(device)[sizes])
    except RuntimeError as error:
        logger.warning("the product of %s tokens by a matrix of %s x %s is left to torch: %s", *sizes, error)
        return None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]; on a CUDA device, of any type."""
    sizes = (len(x), *weight.shape)
    is_plain = bias is None and x.dtype == weight.dtype == torch.bfloat16 and x.shape == (len(x), weight.shape[1])
    is_flat = x.is_contiguous() and weight.is_contiguous() and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    is_named = is_plain and is_flat and sizes in _named(x.device) and x.device.index == torch.cuda.current_device()
    chosen = _prepared(x.device, sizes) if is_named else None
    return F.linear(x, weight, bias) if chosen is None else chosen(x, weight)
