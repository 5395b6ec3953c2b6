"""What the engine does when the device fails, and how it leaves the ranks' groups."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from minisgl.core import SamplingParams
from minisgl.distributed import DistributedInfo, make_communicator
from minisgl.distributed.groups import Groups
from minisgl.engine import engine as engine_module
from minisgl.engine.base import EngineLimits
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import Engine, make_engine
from minisgl.errors import ClosedError, WorkerError
from minisgl.kvcache.pool import make_kv_pool
from minisgl.layers.base import Spec
from minisgl.llm import LLM
from minisgl.models.config import parse_model_config
from minisgl.models.decoder import CausalLM
from tests.models.small import LLAMA
from tests.tools.plan import Planner

CPU = torch.device("cpu")
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def fail(*args, **options):
    raise torch.AcceleratorError(ILLEGAL)


class DeadReadback:
    """Numbers that never arrive."""

    def __init__(self, device):
        pass

    def start(self, tensor):
        return self

    read = fail


def small_engine(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return make_engine(EngineConfig(model_path=str(tmp_path), device="cpu", use_dummy_weight=True, num_pages=8, max_running_req=2))


def step_of(engine):
    planner = Planner(8, 16, 2)
    planner.add(0, [3, 1, 4])
    return engine.submit(planner.plan({0: 3}))


def test_a_device_that_fails_in_a_launch_is_an_error_that_says_so(tmp_path, monkeypatch):
    engine = small_engine(tmp_path)
    monkeypatch.setattr(engine.model.lm_head, "forward", fail)
    with pytest.raises(WorkerError, match="the device failed; begin again in a new process: CUDA error: an illegal memory access"):
        step_of(engine)


def test_a_device_that_fails_later_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "Readback", DeadReadback)
    step = step_of(small_engine(tmp_path))
    with pytest.raises(WorkerError, match="the device failed; begin again in a new process: CUDA error: an illegal memory access"):
        step.read()


def test_an_llm_whose_device_has_failed_is_closed_and_names_the_cause(tiny_models, monkeypatch):
    with LLM(tiny_models("llama"), device="cpu", num_pages=32) as llm:
        monkeypatch.setattr(llm.scheduler.engine.model.lm_head, "forward", fail)
        with pytest.raises(WorkerError, match="illegal memory access"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        with pytest.raises(ClosedError, match="the device failed"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("has_group", [True, False])
def test_graphs_are_gone_before_the_groups_are_and_stay_where_there_are_none(monkeypatch, has_group):
    """NCCL waits for the end of all graphs that hold its calls. Without groups the engine is used again after a step that broke off."""
    triton_backend = pytest.importorskip("minisgl.attention.triton_backend")
    graphs = pytest.importorskip("minisgl.engine.graphs")
    alive, seen = [], []

    class Graphs:
        def __init__(self, *args):
            alive.append(id(self))

        def __del__(self):
            alive.remove(id(self))

    monkeypatch.setattr(graphs, "DecodeGraphs", Graphs)
    monkeypatch.setattr(pytest.importorskip("minisgl.engine.extend_graphs"), "ExtendGraphs", Graphs)
    monkeypatch.setattr(graphs, "Recorder", lambda device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append(len(alive)))
    config = parse_model_config(LLAMA)
    pool = make_kv_pool(config.num_layers, 8, config.attention.num_kv_heads, 16, config.attention.head_dim, torch.float32, CPU)
    attention = triton_backend.TritonAttention(pool, torch.zeros(3, 4, dtype=torch.int32))
    limits = EngineLimits(num_pages=8, page_size=16, max_seq_len=64, max_running_req=2, vocab_size=config.vocab_size)
    one = DistributedInfo(0, 1)
    model = CausalLM(config, Spec(torch.float32, CPU, one))
    engine = Engine(
        model,
        attention,
        make_communicator(one, Groups(None, None), CPU),
        limits,
        object() if has_group else None,
        max_graph_rows=2,
        max_graph_tokens=8,
    )
    assert len(alive) == 2
    engine.close()
    assert (seen, len(alive)) == (([0], 0) if has_group else ([], 2))
