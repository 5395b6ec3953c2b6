"""What the CUDA graphs compute, without capturing: a stand-in for the recorder runs a step's code again at each replay.

On a CPU the kernels run in Triton's interpreter. That graphs hold it, and hold it rightly, tests/gpu shows.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minisgl.distributed import DistributedInfo, make_communicator
from minisgl.distributed.groups import Groups
from minisgl.engine import engine as engine_module
from minisgl.engine.base import EngineLimits
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.memory import extend_graph_bytes, extend_graph_size
from minisgl.errors import WorkerError
from minisgl.kvcache.pool import make_kv_pool
from minisgl.layers.base import Spec
from minisgl.models.config import parse_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import fill_dummy
from tests.models.small import LLAMA, MOE
from tests.tools.plan import Planner

pytest.importorskip("triton")
extend_graphs = pytest.importorskip("minisgl.engine.extend_graphs")
graphs = pytest.importorskip("minisgl.engine.graphs")
launch = pytest.importorskip("minisgl.kernel.gpu.launch")
from minisgl.attention.torch_backend import TorchAttention  # noqa: E402
from minisgl.attention.triton_backend import TritonAttention  # noqa: E402
from minisgl.engine.device_sampler import DeviceSampler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding holds anything
CPU = torch.device("cpu")
ONE = DistributedInfo(0, 1)
NUM_PAGES, PAGE_SIZE, NUM_SLOTS, NUM_COLUMNS = 40, 16, 4, 16


class Again:
    """A graph's stand-in: computes again, into the tensors of the capture."""

    def __init__(self, compute, outputs):
        self._compute, self._outputs = compute, outputs

    def replay(self):
        for target, values in zip(self._outputs, self._compute(), strict=True):
            target.copy_(values)


class FakeRecorder:
    def __init__(self):
        self.num_captured = 0

    def warm_up(self, compute):
        compute()

    def capture(self, compute):
        self.num_captured += 1
        outputs = compute()
        return Again(compute, outputs), outputs


class Bench:
    """One model twice: eager with dense attention, and as graphs compute it, each with its own pool."""

    def __init__(self, raw, max_tokens=64):
        config = parse_model_config(raw | {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1})
        self.model = CausalLM(config, Spec(torch.float32, CPU, ONE))
        fill_dummy(self.model, 5)
        for name, tensor in self.model.state_dict().items():
            if "norm" not in name:
                tensor.mul_(8)  # far from uniform logits
        comm = make_communicator(ONE, Groups(None, None), CPU)
        limits = EngineLimits(
            num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_seq_len=250, max_running_req=NUM_SLOTS, vocab_size=config.vocab_size
        )
        self.eager = Engine(self.model, TorchAttention(*self._memory(config)), comm, limits, None)
        attention = TritonAttention(*self._memory(config))
        sampler = SimpleNamespace(on_device=DeviceSampler(NUM_SLOTS, config.vocab_size, CPU))
        self.recorder = FakeRecorder()
        self.last_tokens = torch.zeros(NUM_SLOTS + 1, dtype=torch.int64)
        parts = graphs.GraphParts(self.model, attention, comm, sampler, self.last_tokens, self.recorder)
        self.graphs = (extend_graphs.ExtendGraphs(parts, max_tokens), graphs.DecodeGraphs(parts, NUM_SLOTS))
        self.planner = Planner(NUM_PAGES, PAGE_SIZE, NUM_SLOTS)
        self.random = torch.Generator().manual_seed(1)

    @staticmethod
    def _memory(config):
        attention = config.attention
        pool = make_kv_pool(config.num_layers, NUM_PAGES, attention.num_kv_heads, PAGE_SIZE, attention.head_dim, torch.float32, CPU)
        return pool, torch.full((NUM_SLOTS + 1, NUM_COLUMNS), pool.dummy_page, dtype=torch.int32)

    def add(self, uid, length):
        self.planner.add(uid, torch.randint(0, 90, (length,), generator=self.random).tolist())

    def step(self, extend, *, is_token_hidden=False):
        """The tokens that the graphs sample; logits and tokens are those of the eager engine."""
        batch = self.planner.plan(extend, is_token_hidden=is_token_hidden)
        with torch.inference_mode():
            self.eager._last_tokens.copy_(self.last_tokens)  # what only the device knows
            expected = self.eager.forward(batch)
            found = [outputs for own in self.graphs if (outputs := own.run(batch)) is not None]
        assert len(found) == 1
        logits, tokens = found[0]
        assert logits.shape == expected.shape
        if len(expected):
            spread = float(expected.std())
            assert float((logits - expected).abs().max()) < 1e-4 * spread
            assert tokens.tolist() == expected.argmax(-1).tolist()
        for row, token in zip(batch.sample_rows.tolist(), tokens.tolist(), strict=True):
            self.planner.rows[batch.uids[row]].tokens.append(token)
        return tokens.tolist()


@pytest.mark.parametrize("raw", [LLAMA, MOE], ids=["dense", "experts"])
def test_prompts_in_chunks_beside_each_other_and_their_decode_steps_are_those_of_the_eager_engine(raw):
    bench = Bench(raw)
    for uid, length in enumerate((5, 70, 21)):
        bench.add(uid, length)
    assert bench.step({1: 30}) == []  # nobody samples
    assert len(bench.step({0: 5, 1: 40, 2: 19})) == 2  # a whole prompt, a last chunk and one in between
    bench.step(dict.fromkeys((0, 1), 1), is_token_hidden=True)
    bench.add(3, 17)
    assert len(bench.step({2: 2, 3: 17})) == 2
    bench.step(dict.fromkeys(range(4), 1), is_token_hidden=True)
    bench.planner.drop(0)
    bench.add(4, 33)
    bench.step({4: 33})
    bench.step(dict.fromkeys(range(1, 5), 1), is_token_hidden=True)


def share(bench, uid, other, num_pages, tokens):
    """A row that begins with the first pages of another, as the prefix cache gives them, and goes on with `tokens`."""
    bench.planner.add(uid, bench.planner.rows[other].tokens[: num_pages * PAGE_SIZE] + tokens)
    row = bench.planner.rows[uid]
    row.pages, row.num_cached = bench.planner.rows[other].pages[:num_pages], num_pages * PAGE_SIZE
    for attention in (bench.eager._attention, bench.graphs[0]._parts.attention):
        attention.page_table[row.slot, :num_pages] = torch.tensor(row.pages, dtype=torch.int32)


def test_rows_that_share_a_long_prefix_are_decoded_in_graphs(monkeypatch):
    """Together they have more tokens than the pool, so that its size says nothing of their chunks."""
    monkeypatch.setattr(f"{__name__}.NUM_COLUMNS", 20)
    bench = Bench(LLAMA)
    bench.add(0, 260)
    for size in (64, 64, 64, 64, 4):
        bench.step({0: size})
    for uid in (1, 2, 3):
        share(bench, uid, 0, 16, [uid] * 5)
    bench.step(dict.fromkeys((1, 2, 3), 5))
    for _ in range(2):
        assert sum(len(row.tokens) for row in bench.planner.rows.values()) > NUM_PAGES * PAGE_SIZE
        assert len(bench.step(dict.fromkeys(range(4), 1), is_token_hidden=True)) == 4


def test_decode_steps_with_more_chunks_than_graphs_have_room_for_are_left_to_the_engine_and_told_once(monkeypatch, caplog):
    monkeypatch.setattr("minisgl.kernel.gpu.decode_attention.MAX_ITEMS", 3)
    bench = Bench(LLAMA)
    for uid in range(4):
        bench.add(uid, 2)
        bench.step({uid: 2})
    assert len(bench.step(dict.fromkeys(range(3), 1))) == 3
    for _ in range(2):
        assert bench.graphs[1].run(bench.planner.plan(dict.fromkeys(range(4), 1))) is None
        for row in bench.planner.rows.values():
            row.tokens.append(7)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["a decode step has 4 chunks of K/V, CUDA graphs have room for 3; such steps take longer"]


@pytest.fixture
def nothing_computed(monkeypatch):
    """Sizes only."""
    outputs = torch.zeros(NUM_SLOTS, 8), torch.zeros(NUM_SLOTS, dtype=torch.int64)
    monkeypatch.setattr(extend_graphs.ExtendGraphs, "compute", lambda self, size: outputs)


@pytest.mark.usefixtures("nothing_computed")
def test_a_size_is_captured_once_and_the_largest_first():
    bench = Bench(LLAMA, max_tokens=192)
    for uid in range(3):
        bench.add(uid, 9)
        bench.graphs[0].run(bench.planner.plan({uid: 9}))
    assert bench.recorder.num_captured == 2
    assert list(bench.graphs[0]._captured) == [256, 64]


@pytest.mark.usefixtures("nothing_computed")
def test_steps_for_which_no_graph_has_room_are_left_to_the_engine(monkeypatch):
    bench = Bench(LLAMA, max_tokens=128)
    for uid in range(4):
        bench.add(uid, 60)
    extend = bench.graphs[0]
    assert extend.run(bench.planner.plan({0: 33, 1: 33, 2: 33, 3: 30})) is None  # 129 tokens
    assert extend.run(bench.planner.plan(dict.fromkeys(range(4), 1))) is not None
    for uid in range(4):
        bench.planner.rows[uid].tokens = bench.planner.rows[uid].tokens[: bench.planner.rows[uid].num_cached + 1]
    assert extend.run(bench.planner.plan(dict.fromkeys(range(4), 1))) is None  # a decode step
    assert bench.recorder.num_captured == 2
    monkeypatch.setattr(extend_graphs, "MAX_UPDATES", 0)
    bench.planner.rows[0].tokens += [1] * 40
    assert extend.run(bench.planner.plan({0: 40})) is None  # more pages than it can note


@pytest.mark.usefixtures("nothing_computed")
def test_more_rows_than_a_graph_has_are_left_to_the_engine(monkeypatch):
    monkeypatch.setattr(extend_graphs, "extend_graph_rows", lambda count: 2)
    bench = Bench(LLAMA)
    for uid in range(3):
        bench.add(uid, 6)
    assert bench.graphs[0].run(bench.planner.plan({0: 2, 1: 2, 2: 2})) is None
    assert bench.graphs[0].run(bench.planner.plan({0: 2, 1: 2})) is not None


def test_pages_of_the_table_are_written_by_the_graph_itself_and_only_those_of_the_step():
    bench = Bench(LLAMA)
    bench.add(0, 60)
    bench.add(1, 7)
    table = bench.graphs[0]._parts.attention.page_table
    for extend in ({0: 33}, {0: 27, 1: 7}):
        bench.step(extend)
        rows = {uid: bench.planner.rows[uid] for uid in (0, 1)}
        for row in rows.values():
            assert table[row.slot, : len(row.pages)].tolist() == row.pages
        others = [slot for slot in range(NUM_SLOTS + 1) if slot not in {row.slot for row in rows.values()}]
        assert (table[others] == NUM_PAGES).all()


def test_sizes_waste_little_and_cover_all():
    for count in range(1, 2049):
        size = extend_graph_size(count)
        assert count <= size <= max(64, count + 255)
        assert extend_graph_size(size) == size
    assert [extend_graph_size(n) for n in (1, 65, 128, 1025, 2048)] == [64, 128, 128, 1280, 2048]


def test_memory_of_the_graphs_counts_each_sizes_logits_and_the_largest_step_once():
    assert extend_graph_bytes(0, 32, 10**9, 1000, torch.bfloat16) == 0
    one, two = (extend_graph_bytes(tokens, 32, 10**9, 1000, torch.bfloat16) for tokens in (64, 128))
    assert one > 10**9
    assert two - one == extend_graph_bytes(256, 32, 10**9, 1000, torch.bfloat16) - two


@pytest.mark.usefixtures("nothing_computed")
def test_a_rehearsal_runs_every_size_with_all_that_rows_may_want_and_captures_nothing(monkeypatch):
    bench = Bench(LLAMA, max_tokens=300)
    seen = []
    monkeypatch.setattr(graphs.DecodeGraphs, "compute", lambda self, size: size)
    monkeypatch.setattr(extend_graphs.ExtendGraphs, "compute", lambda self, size: size)
    monkeypatch.setattr(graphs.StepGraphs, "_compute_others", lambda self, size, kind, outputs: seen.append((size, kind, outputs)))
    for own in bench.graphs:
        own.rehearse()
    assert seen == [(size, kind, size) for size in (64, 128, 256, 384, 1, 2, 4) for kind in (1, 2)]
    assert bench.recorder.num_captured == 0


def test_what_compiling_leaves_on_the_device_counts_as_taken_by_steps(monkeypatch):
    """The ranks' buffers, tables of positions and pages: all that is gone beside the weights before the largest step is measured."""
    events = []

    class Trial:
        can_be_captured, extends_in_graphs = True, True

        def compile_ahead(self):
            events.append("compiled")

    def build(*sizes):
        events.append(sizes)
        return Trial()

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(engine_module, "available_bytes", lambda device: 900)
    monkeypatch.setattr(engine_module, "measure_step", lambda engine, tokens: events.append(tokens) or 64)
    monkeypatch.setattr(engine_module, "graph_bytes", lambda sizes, vocab, dtype: 0)
    monkeypatch.setattr(engine_module, "extend_graph_bytes", lambda tokens, rows, share, vocab, dtype: share)
    config = EngineConfig(model_path="m", max_running_req=8, max_extend_tokens=1024)
    model = parse_model_config(LLAMA)
    rows, tokens, taken = engine_module._measure(build, config, model, torch.float32, CPU, 1000)
    assert (rows, tokens) == (8, 1024)
    assert events == [(1, 0, 0), (1, 8, 1024), "compiled", 1024]
    assert taken == 100 + 64 + 64
    assert engine_module._measure(build, config, model, torch.float32, CPU, 800)[2] == 64 + 64  # others have given memory back


@pytest.fixture
def compiled(monkeypatch):
    """What is given to the compilers; ten kernels are noted."""
    seen = []
    monkeypatch.setattr(launch, "collecting", lambda: contextlib.nullcontext({number: f"kernel {number}" for number in range(10)}))
    monkeypatch.setattr(launch, "compile_together", seen.extend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return seen


def test_steps_of_every_kind_are_rehearsed_before_an_engine_serves(compiled, monkeypatch):
    bench = Bench(LLAMA)
    seen = []
    monkeypatch.setattr(bench.eager, "_submit", lambda batch: seen.append((batch.num_tokens, batch.num_rows)))
    bench.eager.compile_ahead()
    assert seen == [(512, 4), (1, 1), (2, 2), (3, 3), (4, 4), (1, 1), (2, 2), (4, 4)]  # the last three: no graph has them
    assert compiled == [f"kernel {number}" for number in range(10)]
    monkeypatch.setattr(bench.eager, "_graphs", [SimpleNamespace(sizes=[1, 2], rehearse=lambda: seen.append("graphs"))])
    seen.clear()
    bench.eager.compile_ahead()
    assert seen == [(512, 4), (1, 1), (2, 2), (3, 3), (4, 4), (4, 4), "graphs"]


def test_each_rank_compiles_a_share_and_waits_for_the_others(compiled, monkeypatch):
    bench = Bench(LLAMA)
    waited = []
    monkeypatch.setattr(bench.eager, "_submit", lambda batch: None)
    monkeypatch.setattr(bench.eager, "cpu_group", "ranks")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "barrier", lambda group: waited.append((group, len(compiled))))
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        bench.eager.compile_ahead()
    assert sorted(compiled) == [f"kernel {number}" for number in range(10)]
    assert waited == [("ranks", 4), ("ranks", 7), ("ranks", 10)]


def test_too_little_memory_for_a_rehearsal_is_an_error_that_says_what_to_lower(compiled, monkeypatch):
    bench = Bench(LLAMA)

    def fail(batch):
        raise torch.OutOfMemoryError("40 GiB are wanted")

    monkeypatch.setattr(bench.eager, "_submit", fail)
    with pytest.raises(WorkerError, match="out of memory in a step of 512 new tokens of 4 requests; lower --memory-ratio"):
        bench.eager.compile_ahead()
    assert compiled == []
