"""What `kernel.gpu.launch` does with compiled kernels, without a GPU: `python -m tests.kernel.launch_compiled` prints a JSON object.

For each check its traceback, or nothing. A program of its own, since the test process has Triton's interpreter switched on. A driver that
records launches stands in Triton's place for it; the kernels are really compiled, for sm_90.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.kernel.gpu import (
    activation,
    adjust,
    decode_attention,
    embedding,
    filter,
    inputs,
    linear,
    moe,
    norm,
    prefill_attention,
    rope,
    sampling,
)
from minisgl.kernel.gpu.launch import Launcher, NotedLaunch, collecting, compile_together

TARGET = GPUTarget("cuda", 90, 32)
MODULES = (activation, adjust, decode_attention, embedding, filter, inputs, linear, moe, norm, prefill_attention, rope, sampling)
STREAM = 77
SECONDS = 60
"""A deadline that nothing should need."""


class FakeLauncher:
    """Stands for the C code that launches; a file says that it was built."""

    calls: ClassVar[list[tuple]] = []

    def __init__(self, source, metadata):
        Path(os.environ["TRITON_CACHE_DIR"], f"launcher of {metadata.name}").touch()

    def __call__(self, *args):
        self.calls.append(args)


class FakeDriver:
    """One GPU of sm_90, which a forked process must not ask."""

    launcher_cls = FakeLauncher
    device, pid = 0, os.getpid()
    numbers = itertools.count()
    utils = SimpleNamespace(
        get_device_properties=lambda _device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda name, *_, numbers=numbers: ("module", (name, next(numbers)), 0, 0, 1024),
    )

    def answer(self, value):
        assert os.getpid() == self.pid, "CUDA in a forked process"
        return value

    def get_current_device(self):
        return self.answer(self.device)

    def get_current_stream(self, device):
        return self.answer(STREAM + device)

    def get_current_target(self):
        return self.answer(TARGET)


@Launcher
@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["y"])
def _double(out, x, y, n, block: tl.constexpr, PDL: tl.constexpr = False):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n) + tl.load(y), mask=at < n)


@Launcher
@triton.jit
def _fill(out, value, block: tl.constexpr):
    tl.store(out + tl.arange(0, block), value)


@Launcher
@triton.jit
def _clear(out, block: tl.constexpr):
    tl.store(out + tl.arange(0, block), 0)


@functools.partial(Launcher, is_made_while_collecting=True)
@triton.jit
def _count(out, block: tl.constexpr):
    tl.store(out + tl.arange(0, block), tl.arange(0, block))


@Launcher
@triton.jit
def _from_descriptor(out, tiles, block: tl.constexpr):
    tl.store(out + tl.arange(0, block), tl.reshape(tiles.load([0, 0]), (block,)))


@Launcher
@triton.jit
def _wrong(out, block: tl.constexpr):
    tl.store(out + tl.arange(0, block), no_such_name)  # noqa: F821


def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@contextmanager
def empty_cache():
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        yield Path(folder)
    if before is not None:
        os.environ["TRITON_CACHE_DIR"] = before


# The key


def values():
    """Of everything that a kernel can be given, aligned and not, at the edges of the integer types."""
    for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64):
        memory = tensor(64, dtype=dtype)
        yield from (memory, memory[1:], memory[8:])
    yield from (torch.nn.Parameter(tensor(8)), torch.nn.Parameter(tensor(9)[1:]))
    for dtype, block in ((torch.bfloat16, 16), (torch.bfloat16, 32), (torch.float16, 16)):
        yield TensorDescriptor(tensor(64, 16, dtype=dtype), [64, 16], [16, 1], [block, 16])
    yield from (None, True, False, 0.0, 1.0, 0.5)
    yield from (-1, 0, 1, 2, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 16)


CONSTANTS = (0, 1, 2, 16, True, None, 0.5, "ieee", torch.bfloat16)
OPTIONS = (
    {},
    {"num_warps": 1},
    {"num_warps": 4},
    {"maxnreg": 64},
    {"num_warps": 1, "maxnreg": 64},
    {"launch_pdl": True},
    {"launch_pdl": False},
)


def calls_of(kernel, chance):
    """(args, options), many of which differ in one place. Most arguments of the first are tensors."""
    pools = [CONSTANTS if parameter.is_constexpr else tuple(values()) for parameter in kernel.params]
    for _ in range(3):
        base = [
            chance.choice(pool) if parameter.is_constexpr or chance.random() < 0.3 else tensor(16)
            for parameter, pool in zip(kernel.params, pools, strict=True)
        ]
        yield from ((tuple(base), options) for options in OPTIONS)
        for place, pool in enumerate(pools):
            yield from (((*base[:place], value, *base[place + 1 :]), {}) for value in pool)
        last = kernel.arg_names[-1]
        yield from ((tuple(base[:-1]), {last: value, **options}) for value in CONSTANTS for options in OPTIONS)


def launchers():
    found = {name: value for module in MODULES for name, value in vars(module).items() if isinstance(value, Launcher)}
    assert len(found) == 19
    return [*found.values(), _double]


def check_two_calls_with_one_key_are_one_kernel_to_triton():
    """And the other way round, unless a constant is given by place here and by name there."""
    for launcher in launchers():
        kernel = launcher.kernel
        binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
        theirs_of, ours_of = {}, {}
        for args, options in calls_of(kernel, random.Random(0)):
            _, specialization, rest = binder(*args, **options)
            ours, theirs = key_of(launcher, 0, args, options), (tuple(specialization), tuple(rest.items()))
            assert theirs_of.setdefault(ours, theirs) == theirs, (kernel, args, options)
            if not options.keys() & set(kernel.arg_names):
                assert ours_of.setdefault(theirs, ours) == ours, (kernel, args, options)
        assert len(set(theirs_of.values())) > 50


def key_of(launcher, device, args, options):
    """What tells one compiled kernel of a launcher from another."""
    num_values = len(launcher.value_params)
    prepared = launcher.prepare(*args[num_values:], **options)
    return prepared, prepared.key(device, args[:num_values])


def check_keys_differ_by_device_and_by_how_a_constant_is_given():
    x = tensor(16)
    assert key_of(_fill, 0, (x, 1.0, 16), {}) != key_of(_fill, 1, (x, 1.0, 16), {})
    assert key_of(_fill, 0, (x, 1.0), {"block": 16}) != key_of(_fill, 0, (x, 1.0), {"num_warps": 16})


# The launch


class Spy:
    """Makes each launch of a wrapper in Triton's way and in ours, and compares what reaches the C code."""

    def __init__(self, module, name):
        self.launcher, self.is_same = getattr(module, name), []
        setattr(module, name, self)

    def prepare(self, *constants, **options):
        return lambda grid, *values: self(grid, *values, *constants, **options)

    def __call__(self, grid, *args, **options):
        self.launcher.kernel[grid](*args, **options)
        theirs = FakeLauncher.calls.pop()
        for _ in range(2):
            self.launcher(grid, *args, **options)
        ours = FakeLauncher.calls.pop()
        assert ours[6:9] == (None, None, None), "the second launch went Triton's way"
        assert None not in theirs[6:9]
        pairs = list(zip(ours[:6] + ours[9:], theirs[:6] + theirs[9:], strict=True))
        assert all(a is b or a == b for a, b in pairs[:6]), pairs[:6]
        assert all(a is b or (type(a), a) == (type(b), b) for a, b in pairs[6:]), pairs[6:]
        self.is_same.append(True)


def check_a_launch_passes_what_triton_passes():
    spies = [
        Spy(norm, "_rms_norm_kernel"),
        Spy(rope, "_rope_and_store_kernel"),
        Spy(linear, "_linear_kernel"),
        Spy(embedding, "_vocab_embedding_kernel"),
        Spy(prefill_attention, "_prefill_kernel"),
        Spy(decode_attention, "_decode_kernel"),
    ]
    x, pool, numbers = tensor(4, 1024), tensor(2, 8, 64, 128), tensor(4, dtype=torch.int32)
    norm.rms_norm(x, x[0], 1e-6)
    rope.rope_and_store(tensor(4, 4096), tensor(4, 64), tensor(4, 64), None, pool, pool, numbers)
    linear.linear(x, tensor(512, 1024))
    embedding.vocab_embedding(tensor(4, dtype=torch.int64), x, 16)
    rows, lens = prefill_attention.PrefillRows(numbers, numbers, numbers, numbers), np.array([4], dtype=np.int32)
    tiles, table = torch.from_numpy(prefill_attention.plan_prefill(0 * lens, lens)), tensor(4, 8, dtype=torch.int32)
    prefill_attention.prefill_attention(tensor(4, 16, 128), pool, pool, table, rows, tiles)
    work = decode_attention.DecodeWork(numbers, numbers, numbers, tensor(8, 2, dtype=torch.int32), numbers[:1])
    partials = decode_attention.make_partials(8, 4, 8, 2, 128, x.device)
    decode_attention.decode_attention(tensor(4, 16, 128), pool, pool, table, work, partials)
    assert [len(spy.is_same) for spy in spies] == [1] * 6


def check_a_grid_of_any_size_is_passed_on():
    x = tensor(16, dtype=torch.float32)
    for grid in ((2,), (2,), (2, 3), (2, 3, 4)):
        _fill(grid, x, 1.0, 16)
        assert FakeLauncher.calls.pop()[:4] == (*grid, *[1] * (3 - len(grid)), STREAM)


def check_another_device_or_specialisation_goes_to_another_kernel():
    x, functions = tensor(32, dtype=torch.float32), {}
    one, unaligned, wide, elsewhere = (0, x, x, 16), (0, x[1:], x, 16), (0, x, x, 2**40), (1, x, x, 16)
    for kind, (device, out, y, n) in (
        *(("one", one), ("unaligned", unaligned), ("wide", wide), ("elsewhere", elsewhere)) * 2,
        ("one", (0, x, x, 1)),  # nobody asks for more of n than its width
        ("one", (0, x, x[1:], 16)),  # nor for y's alignment
    ):
        FakeDriver.device = device
        _double((1,), out, x, y, n, 16)
        args = FakeLauncher.calls.pop()
        assert functions.setdefault(kind, args[4]) == args[4]
        assert args[3] == STREAM + device
        assert all(a is b for a, b in zip(args[9:12], (out, x, y), strict=True))
        assert args[12:] == (n, 16, False)
    FakeDriver.device = 0
    assert len(set(functions.values())) == 4


def check_hooks_are_called():
    x, seen = tensor(16, dtype=torch.float32), []
    _fill((1,), x, 1.0, 16)
    _fill((1,), x, 1.0, 16)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(triton.knobs.runtime, name)
        chain.add(seen.append)
        _fill((1,), x, 1.0, 16)
        chain.remove(seen.append)
        assert FakeLauncher.calls.pop()[7:9] == (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    _fill.kernel.add_pre_run_hook(lambda *args, **_options: seen.append(args))
    _fill((1,), x, 1.0, 16)
    _fill.kernel.pre_run_hooks.clear()
    assert seen == [(x, 1.0, 16)]
    FakeLauncher.calls.clear()


def check_an_argument_that_is_missing_is_named():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        _fill((1,), tensor(16), value=1.0, block=16)


# Compiling together


def launched():
    """The names of what was launched since it was asked last."""
    names = [args[4][0] for args in FakeLauncher.calls]
    FakeLauncher.calls.clear()
    return names


def launch_all():
    x = tensor(32, dtype=torch.float32)
    for out in (x, x[1:], x):
        _double((1,), out, x, x, 16, 16, num_warps=1)
        _double((1,), out, x, x, 17, block=16, num_warps=1)
    _fill((1,), x, 1.0, 16)
    _from_descriptor((1,), x, TensorDescriptor(x.view(2, 16), [2, 16], [16, 1], [1, 16]), 16)
    _count((1,), x, 16)


def forget(*launched):
    for launcher in launched:
        launcher.kernel.device_caches.clear()
        launcher.__init__(launcher.kernel)


def hits():
    """(kernel, whether the disk had it) of whatever is compiled from here on."""
    found = []
    triton.knobs.compilation.listener = lambda src, cache_hit, **_rest: found.append((src.name, cache_hit))
    return found


def check_launches_are_noted_once_and_not_made():
    forget(_double, _fill, _from_descriptor)
    with empty_cache():
        with collecting() as noted:
            launch_all()
        names = [launch.kernel.__name__ for launch in noted.values()]
        assert names == ["_double"] * 4 + ["_fill", "_from_descriptor"]
        assert launched() == ["_count"]
        assert not any(isinstance(arg, torch.Tensor) for launch in noted.values() for arg in launch.args)
        launch_all()
        assert launched() == ["_double"] * 6 + ["_fill", "_from_descriptor", "_count"]
        with collecting() as again:
            launch_all()
            thread = threading.Thread(target=_fill, args=((1,), tensor(16, dtype=torch.float32), 1.0, 16))
            thread.start()
            thread.join()
        assert again == {}
        assert launched() == ["_count", "_fill"], "another thread is not collecting"


def check_what_was_noted_is_found_on_the_disk():
    forget(_double, _fill, _from_descriptor)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)  # beside which Python 3.12 warns of a fork
    thread.start()
    try:
        for cores in ({0}, {0, 1}, set(range(64))):
            os.sched_getaffinity = lambda _pid, cores=cores: cores
            with empty_cache() as folder:
                with collecting() as noted:
                    launch_all()
                found = hits()
                compile_together(noted.values(), SECONDS)
                assert no_children()
                assert not found
                assert not any(launcher.kernel.device_caches[0][0] for launcher in (_double, _fill))
                assert {path.name.split()[-1] for path in folder.glob("launcher of *")} >= {"_double", "_fill", "_from_descriptor"}
                launch_all()
                _clear.kernel.warmup(tensor(16), 16, grid=(1,))
                wanted = [("_double", True), ("_double", True), ("_fill", True), ("_from_descriptor", True), ("_clear", False)]
                assert [each for each in found if each[0] != "_count"] == wanted
            forget(_double, _fill, _from_descriptor, _clear)
            FakeLauncher.calls.clear()
    finally:
        stop.set()
        thread.join()
        triton.knobs.compilation.listener = None


def check_kernels_that_share_a_function_are_found_on_the_disk_too():
    """Triton's key of a kernel that calls another function depends on whether the function has been hashed before."""
    kernels = adjust._adjust_kernel, adjust._bias_kernel
    forget(*kernels)
    for function in (adjust._penalised, *(launcher.kernel for launcher in kernels)):
        function.hash = None
    rows = tensor(16, 64, dtype=torch.float32)
    column = tensor(16, dtype=torch.int32)
    numbers = column.view(torch.float32)
    wishes = adjust.Wishes(column, numbers, numbers, numbers, column, column)
    said = adjust.Said(*(tensor(16, 64, dtype=torch.int32) for _ in range(2)), rows)
    with empty_cache():
        try:
            with collecting() as noted:
                adjust.adjust(rows, column, column, wishes, said)
            found = hits()
            compile_together(noted.values(), SECONDS)
            adjust.adjust(rows, column, column, wishes, said)
            assert found == [("_adjust_kernel", True), ("_bias_kernel", True)]
        finally:
            triton.knobs.compilation.listener = None
            FakeLauncher.calls.clear()


def no_children():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


class Stub:
    """In a kernel's place: what its compilation does."""

    def __init__(self, warmup):
        self.warmup, self.__name__ = warmup, "stub"

    def noted(self):
        return NotedLaunch(self, (1,), (), {})


def write(path, text):
    with path.open("a") as file:
        file.write(text)


def is_alive(pid):
    """A process without a parent is a zombie until somebody looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_what_fails_to_compile_is_survived_and_said():
    def die(**_options):
        os.abort()

    def leave(**_options):
        raise SystemExit("from a child")

    with empty_cache(), reported() as messages:
        with collecting() as noted:
            _wrong((1,), tensor(16), 16)
            _fill((1,), tensor(32), 1.0, 32)
        noted |= {name: Stub(warmup).noted() for name, warmup in (("die", die), ("leave", leave))}
        found = hits()
        compile_together(noted.values(), SECONDS)
        assert no_children()
        assert sorted(message.split(" was not")[0] for message in messages) == ["_wrong", "stub", "stub"], messages
        _fill((1,), tensor(32), 1.0, 32)
        assert found == [("_fill", True)]
        triton.knobs.compilation.listener = None
        FakeLauncher.calls.clear()


def check_what_hangs_is_killed_with_its_own_children():
    with empty_cache() as folder, reported() as messages:

        def hang(**_options):
            child = subprocess.Popen(["sleep", "600"])
            write(folder / "pids", f"{os.getpid()} {child.pid} ")
            child.wait()

        started = time.monotonic()
        compile_together([Stub(hang).noted()], 1.0)
        assert time.monotonic() - started < 30
        assert no_children()
        assert len(messages) == 1
        pids = (folder / "pids").read_text().split()
        assert len(pids) == 2
        while any(map(is_alive, pids)):
            assert time.monotonic() - started < 30, "a process is left"


def check_no_more_processes_run_than_there_are_cores():
    os.sched_getaffinity = lambda _pid: {0, 1}
    with empty_cache() as folder, reported():

        def work(**_options):
            write(folder / "log", "+")
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass
            write(folder / "log", "-")

        compile_together([Stub(work).noted() for _ in range(6)], SECONDS)
        log = (folder / "log").read_text()
    assert sorted(log) == ["+"] * 6 + ["-"] * 6
    assert max(log[: end + 1].count("+") - log[:end].count("-") for end in range(len(log))) <= 2


def check_too_few_processes_are_survived():
    fork = os.fork

    def refuse():
        raise OSError("no more processes")

    os.fork = refuse
    try:
        with reported() as messages:
            compile_together([Stub(print).noted()], SECONDS)
    finally:
        os.fork = fork
    assert len(messages) == 2
    assert "no more processes" in messages[0]


def check_it_works_in_a_daemonic_process():
    """Such as those of a `multiprocessing.Pool`, whose multiprocessing starts no children."""

    def work(**_options):
        write(folder / "log", "+")

    def main():
        names = {"get_current_device": lambda: 0, "get_current_target": lambda: TARGET, "launcher_cls": FakeLauncher}
        triton.runtime.driver.set_active(SimpleNamespace(**names))
        compile_together([Stub(work).noted() for _ in range(2)], SECONDS)

    with empty_cache() as folder, reported():
        process = multiprocessing.get_context("fork").Process(target=main, daemon=True)
        process.start()
        process.join(SECONDS)
        assert process.exitcode == 0
        assert (folder / "log").read_text() == "++"


def check_it_works_where_somebody_else_waits_for_all_children():
    def work(**_options):
        write(folder / "log", "+")

    def reap(*_args):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    for handler in (signal.SIG_IGN, reap):
        before = signal.signal(signal.SIGCHLD, handler)
        try:
            with empty_cache() as folder, reported():  # a stub compiles nothing, which is said if nobody was quicker to wait
                compile_together([Stub(work).noted() for _ in range(3)], SECONDS)
                assert (folder / "log").read_text() == "+++"
        finally:
            signal.signal(signal.SIGCHLD, before)


def check_no_process_keeps_a_pipe_of_its_parent():
    """Whoever reads it would take a dead parent for a living one."""
    ours, its = os.pipe()

    def look(**_options):
        found = {entry.name: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
        write(folder / "log", " ".join(found.values()))

    with empty_cache() as folder, reported():
        compile_together([Stub(look).noted()], SECONDS)
        held = (folder / "log").read_text()
    assert "/dev/null" in held
    assert os.readlink(f"/proc/self/fd/{ours}") not in held
    os.close(ours)
    os.close(its)


def check_what_there_was_no_time_for_is_said():
    with empty_cache(), reported() as messages:
        compile_together([Stub(print).noted() for _ in range(3)], 0.0)
    assert messages == ["3 kernels were not compiled ahead; their first launches do it"]


def check_output_is_written_once():
    def speak(**_options):
        sys.stdout.write("from a child\n")
        sys.stdout.flush()
        os.write(2, b"from a child\n")

    sys.stdout.write('{"said": "once"}\n')
    with reported():
        compile_together([Stub(speak).noted() for _ in range(2)], SECONDS)


@contextmanager
def reported():
    """The messages that `launch` logs."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("minisgl.kernel.gpu.launch")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def main():
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
    affinity = os.sched_getaffinity
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            triton.runtime.driver.set_active(FakeDriver())
            os.sched_getaffinity = affinity
            try:
                check()
                trouble = ""
            except Exception:  # the test shows it
                trouble = traceback.format_exc()
            sys.stdout.write(json.dumps({name: trouble}) + "\n")


if __name__ == "__main__":
    main()
