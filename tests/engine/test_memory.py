"""How many pages the pool gets, and the pool itself."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.engine.base import EngineLimits
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import choose_device, make_engine
from minisgl.engine.memory import available_bytes, graph_bytes, plan_memory
from minisgl.engine.peak import largest_batch, measure_step
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import bytes_per_page, make_kv_pool
from minisgl.models.config import parse_model_config
from tests.models.small import LLAMA

MODEL = parse_model_config(LLAMA)
PAGE_BYTES = 2 * 4 * 2 * 16 * 12 * 4
"""K and V, 4 layers, 2 KV heads, 16 tokens, head_dim 12, fp32"""
CPU = torch.device("cpu")


def plan(available, weight_bytes=0, **config):
    return plan_memory(EngineConfig(**config), MODEL, torch.float32, 16, available, weight_bytes, "cpu")


def test_a_page_takes_k_and_v_of_all_layers():
    assert bytes_per_page(4, 2, 16, 12, torch.float32) == PAGE_BYTES
    assert bytes_per_page(4, 2, 16, 12, torch.bfloat16) == PAGE_BYTES // 2


def test_the_pool_takes_what_the_ratio_leaves_after_the_weights_and_keeps_one_page_for_padding():
    found = plan(1000 * PAGE_BYTES, weight_bytes=100 * PAGE_BYTES, memory_ratio=0.5)
    assert found.num_pages == 500 - 100 - 1
    assert found.page_bytes == PAGE_BYTES


def test_no_more_pages_than_running_requests_can_use():
    assert plan(10**12, max_running_req=3, max_seq_len=100).num_pages == 3 * 7
    assert plan(10**12, max_running_req=2).num_pages == 2 * 16


def test_pages_that_were_asked_for_are_given():
    assert plan(10, num_pages=77).num_pages == 77


def test_no_room_for_one_page_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"no memory for the KV pool: 10 MiB available, .*--memory-ratio 0.3 .*weights take 4 MiB"):
        plan(10 * 2**20, weight_bytes=4 * 2**20)


def test_the_step_is_named_where_it_takes_memory():
    config = EngineConfig()
    with pytest.raises(ConfigError, match=r"steps 7 MiB .*; raise --memory-ratio, lower --max-extend-tokens or free memory$"):
        plan_memory(config, MODEL, torch.float32, 16, 10 * 2**20, 4 * 2**20, "cuda", 7 * 2**20)
    with pytest.raises(ConfigError, match=r"; raise --memory-ratio or free memory$"):
        plan(10 * 2**20, weight_bytes=4 * 2**20)


def test_available_memory_is_some():
    assert available_bytes(CPU) > 2**20


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_pool_that_a_device_has_no_memory_for_is_refused_with_its_size(monkeypatch, error):
    def fail(*args, **options):
        raise error("out of memory")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(ConfigError, match=r"does not give 8 MiB for a KV pool of 1023 pages; lower --num-pages"):
        make_kv_pool(1, 1023, 2, 16, 64, torch.float16, torch.device("meta"))


def test_graphs_keep_their_logits_and_one_workspace():
    assert graph_bytes([], 1000, torch.bfloat16) == 0
    one, two = (graph_bytes(sizes, 1000, torch.bfloat16) for sizes in ([1], [1, 2]))
    assert two - one < one
    assert graph_bytes([1], 2000, torch.bfloat16) - one == 1000 * 2


class EngineOfOnePage:
    """Its step does `act`."""

    limits = EngineLimits(num_pages=1, page_size=16, max_seq_len=64, max_running_req=4, vocab_size=96)

    def __init__(self, act):
        self._act = act
        self.sizes = []

    def submit(self, batch):
        self.sizes.append((batch.num_rows, batch.num_tokens))
        self._act()
        return self

    def read(self):
        return None


@pytest.mark.parametrize(("allocated", "elsewhere", "expected"), [(700, 0, 700), (700, 300, 1000), (0, 50, 50)])
def test_the_largest_step_is_measured_with_what_the_allocator_does_not_know(monkeypatch, allocated, elsewhere, expected):
    known, free = [100], [10_000]

    def act():
        known[0] += allocated
        free[0] -= allocated + elsewhere

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: known[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 20_000))
    engine = EngineOfOnePage(act)
    assert measure_step(engine, 10) == 2 * expected
    assert engine.sizes == [(4, 4), (4, 10)]  # what a decode step keeps is there when the largest prefill step runs


def test_the_largest_step_scores_as_many_prompt_tokens_as_are_computed_together():
    limits = replace(EngineOfOnePage.limits, max_seq_len=1000)
    for num_tokens, num_scored in ((10, 10), (1000, 256)):
        batch = largest_batch(limits, num_tokens)
        assert batch.prompt_targets.tolist() == [[0, 0, 20]] * num_scored
        assert len(largest_batch(limits, num_tokens, SamplingParams()).prompt_targets) == 0


def test_the_pool_is_zeroed_and_has_a_page_that_nobody_owns():
    pool = make_kv_pool(3, 5, 2, 16, 8, torch.bfloat16, CPU)
    assert pool.k.shape == pool.v.shape == (3, 6, 2, 16, 8)
    assert not pool.k.any()
    assert not pool.v.any()
    assert pool.dummy_page == pool.num_pages == 5
    assert pool.num_bytes == 6 * bytes_per_page(3, 2, 16, 8, torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_backend": "fastest"}, "--attention-backend fastest: 'fastest' is unknown; known are auto"),
        ({"max_seq_len": 257}, "--max-seq-len 257: the model's context is 256 tokens"),
    ],
)
def test_an_engine_that_cannot_be_made_says_why(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match=message):
        make_engine(EngineConfig(model_path=str(tmp_path), device="cpu", use_dummy_weight=True, num_pages=8, **config))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_cuda_device_without_triton_is_refused_with_the_install_line(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"triton is not installed; run `pip install triton`, or use --device cpu"):
        choose_device(EngineConfig(device=device))
    assert choose_device(EngineConfig(device="cpu")) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="--device cuda: torch finds no CUDA device here; use --device cpu"):
        make_engine(EngineConfig(model_path=str(tmp_path), device="cuda", use_dummy_weight=True))


def test_the_memory_plan_is_logged(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    lines = []
    make_engine(EngineConfig(model_path=str(tmp_path), device="cpu", use_dummy_weight=True, num_pages=8), log=lines.append)
    assert any("KV pool 0 MiB (8 pages of 12 KiB)" in line for line in lines)
