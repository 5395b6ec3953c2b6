"""Repairs of Triton 3.6's interpreter, for tests on a machine without a GPU: bfloat16, loop bounds on new numpy, nested functions.

As it is, the interpreter keeps bfloat16 as uint16 and adds, multiplies and compares those integers; it refuses a loop bound that was
loaded from memory on numpy >= 2.4; and it patches the whole language again for each call of a nested function, which is slow.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BF16 = tl.bfloat16


def widen(x):
    """The values of stored bfloat16."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(x):
    """Stored bfloat16 of values: rounded to nearest even, NaN kept."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(np.shape(x))


def is_bf16(handle):
    return handle.dtype.scalar == BF16


@cache
def install():
    """Patch the interpreter, once per process, however often it is called; before any kernel runs."""
    builder = interpreter.InterpreterBuilder
    patch_tensor = interpreter._patch_lang_tensor
    cast, binary, unary, fma, dot = (getattr(builder, n) for n in ("cast_impl", "binary_op", "unary_op", "create_fma", "create_dot"))
    reduce = interpreter.ReduceOps.apply_impl
    handle_of = interpreter.TensorHandle

    def patch_tensor_with_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def cast_impl(self, source, target):
        old, new = source.dtype.scalar, target.scalar
        if old == BF16 and new != BF16:
            values = widen(source.data)
            return handle_of(values if new == tl.float32 else values.astype(interpreter._get_np_dtype(target)), new)
        if new == BF16 and old != BF16:
            return handle_of(narrow(source.data.astype(np.float32)), new)
        return cast(self, source, target)

    def binary_op(self, left, right, operation):
        if not (is_bf16(left) and is_bf16(right)):
            return binary(self, left, right, operation)
        out = operation(widen(left.data), widen(right.data))
        return handle_of(out, tl.int1) if out.dtype == bool else handle_of(narrow(out), BF16)

    def unary_op(self, value, operation):
        return handle_of(narrow(operation(widen(value.data))), BF16) if is_bf16(value) else unary(self, value, operation)

    def create_fma(self, x, y, z):
        return handle_of(narrow(widen(x.data) * widen(y.data) + widen(z.data)), BF16) if is_bf16(z) else fma(self, x, y, z)

    def create_dot(self, left, right, total, precision, max_imprecise):
        left, right = (handle_of(widen(h.data), tl.float32) if is_bf16(h) else h for h in (left, right))
        return dot(self, left, right, total, precision, max_imprecise)

    def tensor_of(values, dtype):
        shape = list(np.shape(values))
        return tl.core.tensor(handle_of(values, dtype), tl.block_type(dtype, shape) if shape else dtype)

    def apply_impl(self, inputs):
        if not (isinstance(inputs, tuple) and inputs[0].dtype == BF16):
            return reduce(self, inputs)
        out = reduce(self, (tensor_of(widen(inputs[0].handle.data), tl.float32), *inputs[1:]))
        is_several = isinstance(out, (tuple, list))
        narrowed = [tensor_of(narrow(t.handle.data), BF16) if t.dtype == tl.float32 else t for t in (out if is_several else (out,))]
        return tuple(narrowed) if is_several else narrowed[0]

    def patch_language(_function):
        scope = interpreter._LangPatchScope()
        for part in (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base):
            interpreter._patch_builtin(part, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_tensor(tl.core.tensor, scope)
        for part in (tl, tl.core):
            interpreter._patch_lang_core(part, scope)
        return scope

    def call(self, *args, **kwargs):  # the launch that runs has patched the language already
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang_tensor = patch_tensor_with_index
    builder.cast_impl, builder.binary_op, builder.unary_op = cast_impl, binary_op, unary_op
    builder.create_fma, builder.create_dot = create_fma, create_dot
    interpreter.ReduceOps.apply_impl = apply_impl
    interpreter._patch_lang = patch_language
    interpreter.InterpretedFunction.__call__ = call
