"""Matrix products, whole or cut over the ranks, several checkpoint matrices fused into one where they share their input.

Letters: T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.core import Context
from minisgl.errors import ConfigError
from minisgl.kernel import products
from minisgl.kernel.dispatch import kernels_for
from minisgl.kernel.packed import can_pack, pack, packed_linear
from minisgl.layers.base import BaseOP, Spec
from minisgl.layers.norm import RMSNorm

__all__ = ["FusedLinear", "Linear", "RowLinear", "divide", "linear"]

TRANSPOSED_ROWS = range(2, 65)
"""On a CPU, row counts for which (W @ x.T).T beats F.linear: its blocking suits tall times skinny. Only where matrices are not packed."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]."""
    if x.device.type == "cpu" and x.shape[0] in TRANSPOSED_ROWS:
        product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
        return product.t().contiguous()
    return products.product(x, weight, bias) if x.device.type == "cuda" else F.linear(x, weight, bias)


def divide(count: int, size: int, what: str) -> int:
    """`count` / `size`; ConfigError with both numbers if that is not even."""
    if count % size:
        raise ConfigError(f"{count} {what} cannot be split evenly over {size} ranks; choose another --tp")
    return count // size


class Linear(BaseOP):
    """One matrix. The caller gives this rank's sizes."""

    def __init__(self, in_size: int, out_size: int, has_bias: bool, spec: Spec) -> None:
        self.weight = spec.empty(out_size, in_size)
        if has_bias:
            self.bias = spec.empty(out_size)
        self._packed: torch.Tensor | None = None
        self._few_rows = kernels_for(spec.device).few_rows

    def pack(self) -> None:
        if can_pack(self.weight.dtype, self.weight.device):
            self._packed = pack(self.weight)
            del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        return self._product(x, getattr(self, "bias", None))

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._few_rows is not None and self._few_rows.is_faster(len(x), x.shape[1], False):
            return self._few_rows.linear(x, self.weight, bias)
        return linear(x, self.weight, bias) if self._packed is None else packed_linear(x, self._packed, bias)


class RowLinear(Linear):
    """A matrix cut along its inputs: the ranks' partial sums are reduced, a bias is added once, after that."""

    def forward(self, x: torch.Tensor, context: Context | None = None) -> torch.Tensor:
        """[T, this rank's inputs] -> [T, out]; the context brings the communicator."""
        assert context is not None
        total: torch.Tensor = context.comm.all_reduce(self._product(x, None))
        return total + self.bias if hasattr(self, "bias") else total


class _Part(BaseOP):
    """A named view of a fused matrix: only a name for loading."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        if bias is not None:
            self.bias = bias

    def forward(self) -> None:
        raise NotImplementedError("a part of a fused matrix is loaded, not called")


class FusedLinear(BaseOP):
    """Several matrices with the same input as one product; each part keeps its checkpoint name."""

    def __init__(self, in_size: int, parts: dict[str, int], has_bias: bool, spec: Spec) -> None:
        """`parts`: name -> this rank's output size, in the order of the outputs."""
        self._weight: torch.Tensor | None = spec.empty(sum(parts.values()), in_size)
        self._packed: torch.Tensor | None = None
        self._bias = spec.empty(sum(parts.values())) if has_bias else None
        self._kernels = kernels_for(spec.device)
        self._parts: dict[str, BaseOP] = {}
        start = 0
        for name, size in parts.items():
            end = start + size
            self._parts[name] = _Part(self._weight[start:end], None if self._bias is None else self._bias[start:end])
            start = end

    def state_dict(self, *, prefix: str = "", result: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The parts stand where the fused matrix's owner stands: `prefix` is the owner's, without this field's name."""
        result = {} if result is None else result
        for name, part in self._parts.items():
            part.state_dict(prefix=f"{prefix}{name}.", result=result)
        return result

    def pack(self) -> None:
        if self._weight is not None and can_pack(self._weight.dtype, self._weight.device):
            self._packed = pack(self._weight)
            self._weight, self._parts = None, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, sum of parts]"""
        if self._packed is not None:
            return packed_linear(x, self._packed, self._bias)
        assert self._weight is not None
        return linear(x, self._weight, self._bias)

    def forward_normed(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, *, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of norm(x + residual), and x + residual; both inputs [T, in].

        `is_gated`: of two parts of equal size, silu(first) * second instead of both.
        """
        few_rows = self._kernels.few_rows
        if few_rows is not None and few_rows.is_faster(len(x), x.shape[1], True):
            return few_rows.norm_linear(x, residual, (norm.weight, norm.eps), self._weight, self._bias, is_gated=is_gated)
        hidden, total = norm.forward_add(x, residual)
        product = self.forward(hidden)
        return (self._kernels.silu_mul(product) if is_gated else product), total
