"""Every attention backend against the kernel twin and against dense attention in fp64, over pages in any order."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from minisgl.attention import ATTENTION_BACKENDS, TorchAttention, choose_attention_backends, make_attention_backend
from minisgl.attention.base import PhasedAttention
from minisgl.attention.flash_backend import FlashAttention, load_flash_attention
from minisgl.attention.flashinfer_backend import FlashInferAttention, load_flashinfer
from minisgl.attention.probe import TRIAL_PAGES, why_not
from minisgl.core import make_batch
from minisgl.errors import ConfigError
from minisgl.kernel import reference
from minisgl.kvcache.pool import make_kv_pool
from tests.attention.fake_libraries import MODULES
from tests.tools.plan import Planner

NUM_LAYERS, LAYER = 2, 1
GARBAGE = float("nan")
"""What stands in slots that no row has written: what an earlier owner left there, which may have overflowed."""
STEPS = {
    "one prompt": [{0: 37}],
    "prompts": [{0: 16, 1: 1, 2: 50}],
    "decodes of like lengths": [{0: 30, 1: 31, 2: 33}, {0: 1, 1: 1, 2: 1}],
    "decodes of unlike lengths": [{0: 1, 1: 200, 2: 90, 3: 7}, {0: 1, 1: 1, 2: 1, 3: 1}],
    "chunks": [{0: 5, 1: 20}, {0: 13, 1: 1}, {0: 64, 1: 17}],
    "chunks and decodes": [{0: 40, 1: 9, 3: 5}, {0: 1, 1: 1, 2: 21, 3: 30}, {0: 1, 1: 1, 2: 2, 3: 1, 4: 1}],
}
"""Each step: uid -> new tokens."""


BACKENDS = ["torch", "triton", *MODULES]
"""What the tests run over; see `make_backend`."""
PAIRS = ["fi,fa 4", "fa 3,torch"]


def make_backend(name, pool, table):
    """A registered backend; one of the libraries with a stand-in in its place; or one for each phase."""
    prefill, _, decode = name.partition(",")
    if decode:
        return PhasedAttention(make_backend(prefill, pool, table), make_backend(decode, pool, table))
    if name not in MODULES:
        return make_attention_backend(name, pool, table)
    with mock.patch.dict(sys.modules, MODULES[name]):
        if name == "fi":
            return FlashInferAttention(pool, table, load_flashinfer())
        return FlashAttention(pool, table, load_flash_attention(9))


class Bench:
    """A backend with a poisoned pool, and the K and V of all tokens so far in fp64."""

    def __init__(self, name, page_size, heads, head_dim, dtype, device, make=make_backend):
        self.num_heads, self.num_kv_heads = heads
        self.head_dim, self.dtype = head_dim, dtype
        self.random = torch.Generator().manual_seed(page_size + head_dim)
        num_pages = 5 + 600 // page_size + (8 if page_size > 1 else 0)
        self.pool = make_kv_pool(NUM_LAYERS, num_pages, self.num_kv_heads, page_size, head_dim, dtype, device)
        for tensor in (self.pool.k, self.pool.v):
            tensor.fill_(GARBAGE)
        self.planner = Planner(num_pages, page_size, 8)
        table = torch.full((8, -(-260 // page_size)), self.pool.dummy_page, dtype=torch.int32, device=device)
        self.backend = make(name, self.pool, table)
        self.k, self.v = {}, {}

    def step(self, extend):
        """(backend's output, twin's, fp64), [T, H, D] each, on the CPU."""
        for uid, count in extend.items():
            if uid not in self.planner.rows:
                self.planner.add(uid, [])
                self.k[uid] = self.v[uid] = torch.empty(0, self.num_kv_heads, self.head_dim, dtype=torch.float64)
            self.planner.rows[uid].tokens += [0] * count
        batch = self.planner.plan(extend)
        rows, columns, pages = torch.from_numpy(batch.table_updates).long().unbind(1)
        self.backend.page_table[rows, columns] = pages.int().to(self.backend.page_table.device)
        q, k, v = (torch.randn(batch.num_tokens, n, self.head_dim, generator=self.random).to(self.dtype) for n in self.heads)
        device = self.pool.k.device
        out = self.backend.forward(q.to(device), k.to(device), v.to(device), LAYER, self.backend.prepare(batch))
        return out.cpu(), self._twin(batch, q), self._dense(batch, q, k, v)

    @property
    def heads(self):
        return self.num_heads, self.num_kv_heads, self.num_kv_heads

    def _twin(self, batch, q):
        pages = self.backend.page_table.cpu()[torch.from_numpy(batch.slots).long()]
        k, v = self.pool.k[LAYER].cpu(), self.pool.v[LAYER].cpu()
        return reference.paged_attention(
            q, k, v, pages, batch.cached_lens.tolist(), batch.extend_lens.tolist(), 1 / math.sqrt(self.head_dim)
        )

    def _dense(self, batch, q, k, v):
        outs, start = [], 0
        for uid, count in zip(batch.uids, batch.extend_lens.tolist(), strict=True):
            new = slice(start, start + count)
            start += count
            self.k[uid], self.v[uid] = torch.cat((self.k[uid], k[new].double())), torch.cat((self.v[uid], v[new].double()))
            for index in range(count):
                length = len(self.k[uid]) - count + index + 1
                group = self.num_heads // self.num_kv_heads
                keys, values = (t[uid][:length].repeat_interleave(group, dim=1) for t in (self.k, self.v))
                scores = torch.einsum("hd,lhd->hl", q[new][index].double(), keys) / math.sqrt(self.head_dim)
                outs.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values))
        return torch.stack(outs)


CPU = torch.device("cpu")
GPU = torch.device("cuda") if torch.cuda.is_available() else None


def device_of(name):
    """Triton's kernels run in the interpreter where there is no GPU; the stand-ins run on the CPU."""
    return GPU if GPU and name == "triton" else CPU


def takes_all(name):
    """Whether a backend does all cases. A program takes 20 to 40 ms in Triton's interpreter; stand-ins need fewer."""
    return name == "torch" or (name == "triton" and GPU is not None)


def check(bench, steps, tolerance):
    for extend in steps:
        out, twin, dense = bench.step(extend)
        assert out.dtype == bench.dtype
        torch.testing.assert_close(twin.double(), dense, rtol=0, atol=tolerance)
        torch.testing.assert_close(out.double(), dense, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "steps", "page_size"),
    [
        (name, steps, page_size)
        for name in BACKENDS + PAIRS
        for steps in STEPS
        for page_size in (1, 16, 64)
        if takes_all(name) or page_size == 16 or steps == "chunks"
    ],
)
def test_plans_of_every_kind(name, steps, page_size):
    heads = (3, 1) if name == "triton" and GPU is None else (6, 2)
    check(Bench(name, page_size, heads, 64, torch.float32, device_of(name)), STEPS[steps], 2e-6)


@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    [
        (name, head_dim, heads)
        for name in BACKENDS
        for head_dim in (2, 64, 80, 128)
        for heads in ((4, 4), (8, 4), (6, 2), (8, 1))
        if takes_all(name) or (head_dim, heads) in ((2, (4, 4)), (80, (6, 2)))
    ],
)
def test_head_counts_and_sizes(name, head_dim, heads):
    check(Bench(name, 16, heads, head_dim, torch.float32, device_of(name)), STEPS["chunks and decodes"], 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BACKENDS)
def test_half_types(name, dtype):
    check(Bench(name, 16, (8, 2), 64, dtype, device_of(name)), STEPS["chunks and decodes"], 2e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("head_dim", [80, 96, 100, 120])
@pytest.mark.parametrize("name", BACKENDS)
def test_half_types_with_head_dims_that_are_no_power_of_two(name, head_dim):
    bench = Bench(name, 64, (2, 1), head_dim, torch.bfloat16, device_of(name))
    check(bench, [{0: 70, 1: 3}, {0: 1, 1: 1}], 2e-2)


@pytest.mark.parametrize("name", BACKENDS)
def test_random_walks(name):
    """Rows come, grow by any number of tokens and go; others get their pages with what they hold."""
    order, bench = random.Random(7), Bench(name, 16, (4, 2), 16, torch.float32, device_of(name))
    for _ in range(5 if name == "triton" and GPU is None else 40):
        uids = order.sample(range(6), order.randint(1, 5))
        for uid in uids:
            if uid in bench.k and len(bench.k[uid]) > 60:
                bench.planner.drop(uid)
                del bench.k[uid], bench.v[uid]
        check(bench, [{uid: order.choice([1, 1, 1, 2, 5, 17]) for uid in uids}], 2e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_planned_slots_of_the_layer_are_written(name):
    bench = Bench(name, 16, (4, 2), 32, torch.float32, device_of(name))
    bench.step({0: 20, 1: 3})
    pages = [page for row in bench.planner.rows.values() for page in row.pages]
    for tensor in (bench.pool.k, bench.pool.v):
        assert bool(tensor[0].isnan().all())
        is_written = ~tensor[LAYER].isnan().all(dim=3).all(dim=1)
        assert int(is_written.sum()) == 23
        assert set(is_written.nonzero()[:, 0].tolist()) == set(pages)
        assert int((~tensor[LAYER].isnan()).sum()) == 23 * 2 * 32


@pytest.mark.parametrize("name", BACKENDS)
def test_the_backend_does_not_write_into_its_inputs(name):
    bench = Bench(name, 16, (4, 2), 32, torch.float32, device_of(name))
    bench.planner.add(0, [0] * 9)
    batch = bench.planner.plan({0: 9})
    rows, columns, pages = torch.from_numpy(batch.table_updates).long().unbind(1)
    bench.backend.page_table[rows, columns] = pages.int().to(bench.backend.page_table.device)
    inputs = [torch.randn(9, heads, 32, device=device_of(name)) for heads in (4, 2, 2)]
    copies = [tensor.clone() for tensor in inputs]
    bench.backend.forward(*inputs, LAYER, bench.backend.prepare(batch))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


def test_steps_over_fixed_buffers_equal_prepared_ones():
    """What a CUDA graph does: buffers made once, a plan copied into them, padding rows behind the step's own."""
    bench = Bench("triton", 16, (4, 2), 32, torch.float32, device_of("triton"))
    graph_part = bench.backend.graph_part
    bench.step({0: 255, 1: 3})
    work = empty_work(graph_part.max_items(4), 4, bench.pool.k.device)
    for _ in range(2):
        for uid in (0, 1):
            bench.planner.rows[uid].tokens.append(0)
        batch = bench.planner.plan({0: 1, 1: 1})
        rows, columns, pages = torch.from_numpy(batch.table_updates).long().reshape(-1, 3).unbind(1)
        bench.backend.page_table[rows, columns] = pages.int().to(bench.backend.page_table.device)
        lengths = np.concatenate((batch.positions + 1, np.zeros(2, dtype=np.int32)))
        first_partial, items = graph_part.plan_decode(lengths, len(lengths))
        work.slots[:2].copy_(torch.from_numpy(batch.slots))
        for target, values in ((work.lengths, lengths), (work.first_partial, first_partial), (work.items[: len(items)], items)):
            target.copy_(torch.from_numpy(values))
        work.num_items.fill_(len(items))
        q, k, v = (torch.randn(2, heads, 32, generator=bench.random).to(bench.pool.k.device) for heads in bench.heads)
        expected = bench.backend.forward(q, k, v, LAYER, bench.backend.prepare(batch))
        slots = torch.tensor([*batch.write_slots.tolist(), *[bench.pool.dummy_page * 16] * 2], device=bench.pool.k.device)
        metadata = graph_part.decode_metadata(work, slots)
        padded = [torch.cat((tensor, torch.zeros_like(tensor))) for tensor in (q, k, v)]
        assert torch.equal(graph_part.forward(*padded, LAYER, metadata)[:2], expected)


def empty_work(num_items, num_rows, device):
    from minisgl.kernel.gpu.decode_attention import DecodeWork

    shapes = ((num_rows,), (num_rows,), (num_rows,), (num_items, 2), (1,))
    return DecodeWork(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


@pytest.mark.parametrize("name", BACKENDS)
def test_kv_that_another_kernel_has_stored_is_attended(name):
    bench = Bench(name, 16, (2, 1), 16, torch.float32, device_of(name))
    if not bench.backend.takes_stored_kv:
        pytest.skip("this backend stores by rows of its own")
    bench.planner.add(0, [0] * 5)
    batch = bench.planner.plan({0: 5})
    rows, columns, pages = torch.from_numpy(batch.table_updates).long().unbind(1)
    bench.backend.page_table[rows, columns] = pages.int().to(bench.backend.page_table.device)
    q, k, v = (torch.randn(5, heads, 16, generator=bench.random).to(device_of(name)) for heads in bench.heads)
    metadata = bench.backend.prepare(batch)
    assert metadata.write_slots.tolist() == batch.write_slots.tolist()
    expected = bench.backend.forward(q, k, v, LAYER, metadata)
    assert torch.equal(bench.backend.attend(q, LAYER, metadata), expected)


def test_every_registered_backend_is_tested():
    assert {part.split()[0] for name in BACKENDS for part in name.split(",")} == set(ATTENTION_BACKENDS)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the libraries themselves
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["fa", "fi"])
def test_the_libraries_themselves(name, head_dim, page_size):
    """As installed; in bfloat16, which is what they take."""
    pool = make_kv_pool(1, 1, 1, page_size, head_dim, torch.bfloat16, torch.device("cuda"))
    try:
        make_attention_backend(name, pool, torch.zeros(1, 1, dtype=torch.int32, device="cuda"))
    except ConfigError as error:
        pytest.skip(str(error))
    bench = Bench(name, page_size, (8, 2), head_dim, torch.bfloat16, torch.device("cuda"), make_attention_backend)
    check(bench, STEPS["chunks and decodes"] + [{0: 1, 1: 1, 2: 1}], 2e-2)


@pytest.mark.parametrize(
    ("name", "device", "chosen"),
    [
        ("auto", "cpu", ("torch", "torch")),
        ("auto", "cuda", ("triton", "triton")),
        ("fa", "cuda", ("fa", "fa")),
        ("fa,triton", "cuda", ("fa", "triton")),
        ("auto, fi", "cuda", ("triton", "fi")),
    ],
)
def test_one_name_is_for_both_phases_and_two_are_prefill_and_decode(name, device, chosen):
    assert choose_attention_backends(name, device) == chosen


def test_a_pair_takes_part_in_graphs_if_its_decode_does_and_takes_stored_kv_if_both_do():
    def pair(prefill, decode):
        pool = make_kv_pool(1, 2, 1, 16, 16, torch.float32, device_of("triton"))
        return make_backend(f"{prefill},{decode}", pool, torch.zeros(1, 1, dtype=torch.int32, device=pool.k.device))

    graphs = {decode: pair("fi", decode).graph_part is not None for decode in ("triton", "torch", "fa 3")}
    assert graphs == {"triton": True, "torch": False, "fa 3": False}
    stored = {names: pair(*names).takes_stored_kv for names in (("fi", "triton"), ("torch", "triton"), ("triton", "torch"))}
    assert stored == {("fi", "triton"): True, ("torch", "triton"): False, ("triton", "torch"): False}
    assert pair("fa 4", "triton").description == "fa (flash_attn.cute) for prefill, triton for decode"


def test_a_pair_computes_each_phase_by_its_own_backend():
    bench = Bench("fi,fa 4", 16, (2, 1), 16, torch.float32, CPU)
    for extend, kind in (({0: 5, 1: 3}, FlashInferAttention), ({0: 1, 1: 1}, FlashAttention), ({0: 2, 1: 1}, FlashInferAttention)):
        for uid, count in extend.items():
            bench.planner.rows.get(uid) or bench.planner.add(uid, [])
            bench.planner.rows[uid].tokens += [0] * count
        assert isinstance(bench.backend.prepare(bench.planner.plan(extend)).backend, kind)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fastest,torch", "--attention-backend fastest,torch: 'fastest' is unknown; known are auto, fa, fi, torch, triton"),
        ("torch,", "--attention-backend torch,: '' is unknown; known are auto"),
        ("torch,torch,torch", "3 names found; one for both phases is allowed, or two: PREFILL,DECODE"),
    ],
)
def test_a_pair_with_something_else_in_it_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        choose_attention_backends(name, "cpu")


class OnCuda:
    """A pool's tensor as far as a refusal looks at it."""

    device = torch.device("cuda")

    def __init__(self, dtype):
        self.dtype = dtype

    def element_size(self):
        return self.dtype.itemsize


def pool_on_cuda(dtype):
    return mock.Mock(k=OnCuda(dtype), page_size=16)


@pytest.mark.parametrize("name", ["fa", "fi"])
def test_a_library_is_refused_where_it_cannot_run(name):
    pool = make_kv_pool(1, 2, 1, 16, 8, torch.float32, CPU)
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: the device is cpu; it needs cuda"):
        make_attention_backend(name, pool, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: K/V is float32; it takes bfloat16 and float16. Set --dtype"):
        make_attention_backend(name, pool_on_cuda(torch.float32), None)


def without(monkeypatch, *modules):
    for module in modules or ("flash_attn_interface", "sgl_kernel", "sgl_kernel.flash_attn", "flash_attn", "flash_attn.cute", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)


def test_no_flash_attention_is_an_error_with_what_each_package_said(monkeypatch):
    without(monkeypatch)
    found = r"flash_attn_interface \(.*sgl_kernel.flash_attn \(.*flash_attn.cute \(.*pip install"
    with pytest.raises(ConfigError, match=f"no FlashAttention can be imported: {found}"):
        load_flash_attention(9)


def test_no_flashinfer_is_an_error_with_the_command_that_installs_it(monkeypatch):
    without(monkeypatch)
    with pytest.raises(ConfigError, match=r"--attention-backend fi: .*pip install flashinfer-python"):
        make_attention_backend("fi", pool_on_cuda(torch.bfloat16), None)


class Broken:
    """A library whose import fails as that of parts which do not fit each other does."""

    def find_spec(self, name, path=None, target=None):
        if name in ("flashinfer", "flash_attn_interface"):
            raise RuntimeError("versions differ")


def test_a_library_that_fails_at_its_import_is_told_and_the_next_one_tried(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ConfigError, match="--attention-backend fi: versions differ"):
        load_flashinfer()
    with mock.patch.dict(sys.modules, {name: module for name, module in MODULES["fa 4"].items() if name != "flash_attn_interface"}):
        assert load_flash_attention(9)[0] == "flash_attn.cute"


def test_a_flash_attention_without_kernels_for_this_gpu_is_not_taken():
    with mock.patch.dict(sys.modules, MODULES["fa 4"] | MODULES["fa 3"]):
        assert [load_flash_attention(capability)[0] for capability in (8, 9, 10)] == ["flash_attn_interface"] * 2 + ["flash_attn.cute"]
        with pytest.raises(ConfigError, match=r"flash_attn.cute .has no paged kernels for compute capability 12.x"):
            load_flash_attention(12)


def test_pages_that_flash_attention_would_read_whole_are_refused():
    with pytest.raises(ConfigError, match="--attention-backend fa: --page-size 128 found, at most 64 is allowed"):
        make_attention_backend("fa", mock.Mock(k=OnCuda(torch.bfloat16), page_size=128), None)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["torch", *MODULES, *PAIRS])
def test_a_trial_finds_nothing_wrong_with_a_backend_that_works(name, page_size):
    pool = make_kv_pool(1, TRIAL_PAGES, 2, page_size, 16, torch.float32, CPU)
    assert why_not(make_backend(name, pool, torch.full((2, 4), pool.dummy_page, dtype=torch.int32)), 4) is None


class FailsIn(TorchAttention):
    """Fails in one phase, or gives something else."""

    def __init__(self, pool, table, is_decode, fault):
        super().__init__(pool, table)
        self.is_decode, self.fault = is_decode, fault

    def prepare(self, batch):
        cached, extend = batch.cached_lens, batch.extend_lens
        if self.fault == "one token too many" and self.is_faulty(int(extend[0])):
            arrays = {name: batch.view(name) for name in ("slots", "positions", "write_slots", "sample_rows", "input_ids")}
            batch = make_batch(0, (0,), arrays | {"cached_lens": cached + 1, "extend_lens": extend})
        return super().prepare(batch)

    def is_faulty(self, num_new):
        return (num_new == 1) == self.is_decode

    def attend(self, q, layer, metadata):
        out = super().attend(q if self.fault != "no scores" else q * 0, layer, metadata)
        if not self.is_faulty(len(q)):
            return super().attend(q, layer, metadata)
        if self.fault == "raises":
            raise AssertionError("no such head dim")
        if self.fault == "turned dims":
            return super().attend(q.flip(-1), layer, metadata)
        if self.fault == "other heads":
            return super().attend(q.roll(1, dims=1), layer, metadata).roll(-1, dims=1)
        return out * 2 if self.fault == "twice" else out


@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("fault", ["raises", "twice", "no scores", "turned dims", "other heads", "one token too many"])
def test_a_trial_tells_what_fails_in_either_phase(is_decode, head_dim, fault):
    pool = make_kv_pool(1, TRIAL_PAGES, 2, 16, head_dim, torch.float32, CPU)
    found = why_not(FailsIn(pool, torch.full((2, 4), pool.dummy_page, dtype=torch.int32), is_decode, fault), 4)
    assert found == ("AssertionError: no such head dim" if fault == "raises" else "wrong result on cpu")


def test_an_unknown_backend_is_refused_with_the_known_ones():
    pool = make_kv_pool(1, 2, 1, 16, 8, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"--attention-backend fastest: 'fastest' is unknown; known are auto, .*torch"):
        make_attention_backend("fastest", pool, torch.zeros(1, 1, dtype=torch.int32))


def test_auto_runs_on_a_cpu():
    pool = make_kv_pool(1, 2, 1, 16, 8, torch.float32, CPU)
    assert make_attention_backend("auto", pool, torch.zeros(1, 1, dtype=torch.int32)) is not None


def test_triton_is_refused_on_a_cpu_and_not_imported(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pool = make_kv_pool(1, 2, 1, 16, 8, torch.float32, CPU)
    with pytest.raises(ConfigError, match="triton: the device is cpu; it needs cuda"):
        make_attention_backend("triton", pool, torch.zeros(1, 1, dtype=torch.int32))
    code = "import sys, minisgl.attention; print('minisgl.kernel.gpu' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
