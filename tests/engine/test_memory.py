"""How many pages the pool gets, and the pool itself."""

from __future__ import annotations

import json

import pytest
import torch

from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import make_engine
from minisgl.engine.memory import available_bytes, plan_memory
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


def test_available_memory_is_some():
    assert available_bytes(CPU) > 2**20


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
        ({"attention_backend": "fastest"}, "--attention-backend fastest: known are auto"),
        ({"max_seq_len": 257}, "--max-seq-len 257: the model's context is 256 tokens"),
    ],
)
def test_an_engine_that_cannot_be_made_says_why(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match=message):
        make_engine(EngineConfig(model_path=str(tmp_path), device="cpu", use_dummy_weight=True, num_pages=8, **config))


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
