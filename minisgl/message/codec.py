"""Tensors on the wire: (dtype name, little-endian bytes) of a one-dimensional array, through one pair of hooks.

Called by the encoders and decoders of this package only. Imports torch inside the decoding hook and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    TokenIds: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
else:

    class _AnyArray(type):
        """msgspec checks the hook's result against the annotation; a tensor or an array passes."""

        def __instancecheck__(cls, value: object) -> bool:
            return hasattr(value, "dtype") and hasattr(value, "shape")

    class TokenIds(metaclass=_AnyArray):
        """Marks a field that holds int32 token ids: torch or numpy when sent, a torch tensor when decoded."""


T = TypeVar("T")


def encode_hook(value: Any) -> tuple[str, bytes]:
    """One-dimensional int32 torch (CPU) or numpy array -> wire form. Raises TypeError for anything else."""
    array = value if isinstance(value, np.ndarray) else value.numpy() if hasattr(value, "numpy") else None
    if array is None or array.dtype != np.int32 or array.ndim != 1:
        shape = getattr(value, "shape", None)
        raise TypeError(f"a message carries one-dimensional int32 arrays; got {type(value).__name__} {getattr(value, 'dtype', '')} {shape}")
    return "int32", array.tobytes()


def decode_hook(kind: type, value: Any) -> Any:
    """Wire form -> int32 torch tensor [n] that owns its memory. Raises ValueError if the frame is malformed."""
    if kind is not TokenIds:  # type: ignore[comparison-overlap]  # the alias that checkers see is not the class at run time
        raise TypeError(f"no wire form for {kind}")
    name, data = value if isinstance(value, (list, tuple)) and len(value) == 2 else (None, None)
    if name != "int32" or not isinstance(data, bytes) or len(data) % 4:
        raise ValueError("token ids are sent as ['int32', bytes]")
    import torch

    return torch.from_numpy(np.frombuffer(data, dtype=np.int32).copy())


def make_codec(union: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """The encoder and decoder of one tagged union of Structs."""
    encode = msgspec.msgpack.Encoder(enc_hook=encode_hook).encode
    decode = msgspec.msgpack.Decoder(union, dec_hook=decode_hook).decode
    return encode, decode
