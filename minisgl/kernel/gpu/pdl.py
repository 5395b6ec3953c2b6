"""Programmatic dependent launch: a kernel begins while the one before it still ends, and waits before it touches what that one wrote.

The rule for every kernel launched with `pdl_options`: `gdc_wait()` before the first read of another kernel's result and before the first
store. Weights may be read earlier, and the plan, which is copied before a step. Such a kernel completes only after the one before it, so
the order holds along any chain. Needs compute capability 9.0; MINISGL_DISABLE_PDL=1 turns it off. Knows nothing but the device.
Called by the kernels' launchers.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import functools

import torch
import triton

from minisgl.env import is_pdl_disabled

__all__ = ["pdl_options"]


@functools.cache
def pdl_options() -> dict[str, bool]:
    """Launch arguments: `PDL` is for the kernel, `launch_pdl` for the launch. Without a GPU those of sm_90, for compiling ahead."""
    if triton.knobs.runtime.interpret or is_pdl_disabled():
        return {"PDL": False}
    is_there = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if is_there else {"PDL": False}
