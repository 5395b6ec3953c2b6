"""Launches that cost the host little, and kernels compiled side by side before they are needed.

`Launcher` wraps a Triton kernel: it looks the compiled one up by a key that tells apart what Triton's specialisation tells apart, and
calls it directly. Inside `collecting` launches are noted instead, and `compile_together` compiles what was noted in processes of its own,
by way of Triton's cache on the disk. Knows nothing of the kernels. Called by the wrappers beside it, and by the engine before it serves.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
import triton
from triton.backends.compiler import BaseBackend
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

try:
    from triton.runtime.jit import native_specialize_impl
except ImportError:  # Triton 3.5: all launches go its own way
    native_specialize_impl = None

__all__ = ["COMPILE_SECONDS", "Launcher", "NotedLaunch", "PreparedLaunch", "ceil_div", "collecting", "compile_together", "next_power_of_2"]

COMPILE_SECONDS = 60.0
"""How long `compile_together` waits for all of its processes."""
MOST_PROCESSES = 16
"""Each holds a compiler's memory, and a container may have fewer cores than it sees."""

Noted = dict[Hashable, "NotedLaunch"]
Specializer = Callable[..., tuple[Hashable, ...]]

_noted: ContextVar[Noted | None] = ContextVar("noted launches", default=None)
_logger = logging.getLogger(__name__)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own takes longer than a launch may."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n, 1 or more."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class NotedLaunch:
    """A launch that was not made. It holds no device memory: tensors are stood in for."""

    kernel: Any
    """the Triton function"""
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Pointer:
    """What Triton asks of a tensor when it compiles."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _without_memory(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return _Pointer(arg.dtype, arg.data_ptr() % 16)
    return replace(arg, base=_without_memory(arg.base)) if isinstance(arg, TensorDescriptor) else arg


class Launcher:
    """A Triton kernel whose launches take a short way: `kernel(grid, *args, **options)`; made by decorating what `triton.jit` gives.

    The arguments stand in the kernel's order; its constexpr ones come last, and they alone may be given by name. Options are those of a
    Triton launch. The first launch of a key goes Triton's way, as do all in its interpreter, with launch hooks set or with Triton 3.5.
    Later ones do not look at Triton's environment variables again, nor whether a global variable of the kernel has changed. Constants are
    compared by ==.
    """

    def __init__(self, kernel: Any, *, is_made_while_collecting: bool = False) -> None:
        """`is_made_while_collecting`: for a kernel whose results PyTorch takes as indices, so that none of them may be left out."""
        self.kernel = kernel
        self.is_made_while_collecting = is_made_while_collecting
        self._prepared: dict[Hashable, PreparedLaunch] = {}
        self._has_keys = isinstance(kernel, JITFunction) and native_specialize_impl is not None
        params = kernel.params if self._has_keys else []
        self.value_params = [param for param in params if not param.is_constexpr]
        assert all(param.is_constexpr for param in params[len(self.value_params) :]), "constexpr parameters come last"

    def __call__(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch over `grid` (1 to 3 numbers of programs) on the current stream of the current device, or note it."""
        if self._has_keys:
            num_values = len(self.value_params)
            self.prepare(*args[num_values:], **options)(grid, *args[:num_values])
        else:
            self.kernel[grid](*args, **options)

    def prepare(self, *constants: Any, **options: Any) -> Callable[..., None]:
        """`prepare(*constants, **options)(grid, *values)` is `self(grid, *values, *constants, **options)`; it costs less when kept."""
        if not self._has_keys:
            return lambda grid, *values: self(grid, *values, *constants, **options)
        key = (constants, *options.items())
        return self._prepared.get(key) or self._prepared.setdefault(key, PreparedLaunch(self, constants, options))


class PreparedLaunch:
    """A kernel with its constants and options; compiled ones are kept by a key of the device and of the values that it is launched with."""

    def __init__(self, launcher: Launcher, constants: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._launcher, self._kernel = launcher, launcher.kernel
        self._constants, self._options = constants, options
        self._compiled: dict[Hashable, tuple[Any, ...]] = {}
        self._exactly = _specializer(launcher.value_params, ())
        self._cheaply: Specializer | None = None

    def __call__(self, grid: tuple[int, ...], *values: Any) -> None:
        """See `Launcher`."""
        driver, runtime = triton.runtime.driver.active, triton.knobs.runtime
        device = driver.get_current_device()
        key = self.key(device, values)
        found, noted = self._compiled.get(key), _noted.get()
        if noted is not None and not self._launcher.is_made_while_collecting:
            if found is None:
                noted[self, key] = NotedLaunch(self._kernel, grid, (*map(_without_memory, values), *self._constants), self._options)
            return
        # a hook is a chain of functions, one function or None
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if found is None or self._kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            self._launch_first(key, grid, values)
            return
        x, y, z = (*grid, 1, 1)[:3]
        run, function, metadata, constants = found
        run(x, y, z, driver.get_current_stream(device), function, metadata, None, None, None, *values, *constants)

    def key(self, device: int, values: tuple[Any, ...]) -> Hashable:
        """The device and what Triton's binder makes of the values. Aligned tensors where the first call had some count by type alone."""
        if self._cheaply is None:
            self._cheaply = _specializer(self._launcher.value_params, {i for i, value in enumerate(values) if type(value) is torch.Tensor})
        try:
            return (device, *(self._cheaply(*values) or self._exactly(*values)))
        except AttributeError:  # no tensor where the first call had one
            return (device, *self._exactly(*values))

    def _launch_first(self, key: Hashable, grid: tuple[int, ...], values: tuple[Any, ...]) -> None:
        """Triton's way. What it gives is kept, with the constants in the kernel's order."""
        compiled = self._kernel[grid](*values, *self._constants, **self._options)
        if compiled is not None:
            named = {name: value for name, value in self._options.items() if name in self._kernel.arg_names}
            bound = self._kernel.signature.bind(*values, *self._constants, **named)
            bound.apply_defaults()
            constants = tuple(bound.arguments.values())[len(values) :]
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, constants


def _specializer(params: list[Any], tensors: Collection[int]) -> Specializer:
    """A function of the parameters' values to their part of a key, empty if a tensor is not aligned. A loop would take twice as long."""
    parts, pointers = "", "0"
    for index, param in enumerate(params):
        is_tensor, specializes, aligns = index in tensors, not param.do_not_specialize, not param.do_not_specialize_on_alignment
        exactly = f"_specialize(_backend, {param.name}, {param.is_const}, {specializes}, {aligns})"
        parts += f"{param.name}.dtype, " if is_tensor else f"{exactly}, "
        pointers += f" | {param.name}.data_ptr()" if is_tensor and specializes and aligns else ""
    source = f"lambda {', '.join(param.name for param in params)}: () if ({pointers}) & 15 else ({parts})"
    return cast("Specializer", eval(source, {"_specialize": native_specialize_impl, "_backend": BaseBackend}))


@contextlib.contextmanager
def collecting() -> Iterator[Noted]:
    """Note launches of this thread instead of making them: once each, and only those not compiled in this process yet.

    What they would have written stays unset. Where launches go Triton's way nothing is noted and everything runs.
    """
    noted: Noted = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def compile_together(noted: Collection[NotedLaunch], seconds: float = COMPILE_SECONDS) -> None:
    """Compile what was noted, in several processes at a time, so that a first launch finds it on the disk.

    The processes are forked, though this one has threads and a CUDA context. That is harmless: they only compile, which calls neither
    CUDA nor PyTorch, keep no descriptor of this one and leave without cleaning up; one that waits for a lock which another thread held is
    killed after `seconds`. What fails or is not done by then is compiled at its first launch, which says why.
    """
    triton_key()  # what each of them would compute again
    for launch in noted:  # what comes out depends on the kernels before it, so no process may compute it for itself
        getattr(launch.kernel, "cache_key", None)
    active = triton.runtime.driver.active
    device, target = active.get_current_device(), active.get_current_target()
    driver = SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: target,
        launcher_cls=active.launcher_cls,
    )
    waiting, running = deque(noted), dict[int, tuple[int, str]]()
    most, end = min(len(os.sched_getaffinity(0)), MOST_PROCESSES), time.monotonic() + seconds
    try:
        while (waiting or running) and (left := end - time.monotonic()) > 0:
            while waiting and len(running) < most:
                pid, pipe = _start(waiting[0], driver, seconds)
                running[pipe] = pid, getattr(waiting.popleft().kernel, "__name__", "kernel")
            for pipe in cast("list[int]", wait(list(running), left)):
                _end(pipe, *running.pop(pipe))
    except OSError as error:
        _logger.warning("no process to compile kernels in: %s", error)
    finally:
        for pipe, child in running.items():
            _end(pipe, *child)
    if waiting:
        _logger.warning("%d kernels were not compiled ahead; their first launches do it", len(waiting))


def _start(launch: NotedLaunch, driver: SimpleNamespace, seconds: float) -> tuple[int, int]:
    """The process, and a pipe that ends when it does, whoever waits for it."""
    ours, its = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: a fork beside threads
            pid = os.fork()
    except OSError:
        os.close(ours)
        raise
    else:
        if not pid:
            _compile(launch, driver, seconds, its)
        return pid, ours
    finally:
        os.close(its)


def _end(pipe: int, pid: int, name: str) -> None:
    """Kill what still runs, its own children (the assembler, the C compiler) with it."""
    if not wait([pipe], 0):
        for kill in (os.killpg, os.kill):  # in its first moments it has no group of its own
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    os.close(pipe)
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # somebody else in this process waits for all children, or they are ignored
        status = 0
    if status:
        _logger.warning("%s was not compiled ahead (exit status %d); its first launch does it", name, status)


def _compile(launch: NotedLaunch, driver: SimpleNamespace, seconds: float, pipe: int) -> NoReturn:
    """A forked process, from its first step to its end. Its errors are those of the first launch, which reports them."""
    status = 1
    try:
        os.setsid()  # an interrupt from the terminal is for the parent
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds) + 1)  # if the parent is not there to kill it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it waits for the compilers that it starts
        gc.disable()  # else tensors of the parent might be freed here
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # what the parent has not written yet must not be written twice
            os.dup2(nowhere, standard)
        if pipe != 3:
            os.dup2(pipe, 3, inheritable=False)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # whoever reads the parent's pipes shall see their end
        triton.runtime.driver.set_active(driver)
        compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
        driver.launcher_cls(compiled.src, compiled.metadata)
        status = 0
    finally:
        os._exit(status)
