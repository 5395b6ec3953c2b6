"""`minisgl doctor`: what is here, what can be used, and how a model would fit, without loading it."""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import requires

import pytest
import torch
from safetensors.torch import load_file

from minisgl.attention import ATTENTION_BACKENDS, TorchAttention
from minisgl.bench.doctor import plan_model, probe_backends
from minisgl.bench.machine import OPTIONAL, REQUIRED, installed
from minisgl.cli import main
from minisgl.engine.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.llm import LLM

SETTINGS = {"device": "cpu", "page_size": 8, "max_running_req": 4, "max_seq_len": 100}


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_the_plan_is_what_the_engine_then_does(model, tiny_models):
    plan = plan_model(EngineConfig(str(tiny_models(model)), **SETTINGS))
    with LLM(tiny_models(model), **SETTINGS) as llm:
        limits = llm.scheduler.engine.limits
        assert (plan.num_pages, plan.page_size, plan.max_seq_len) == (limits.num_pages, limits.page_size, limits.max_seq_len)
        assert plan.num_tokens == limits.num_pool_tokens == 4 * 104
    tensors = load_file(tiny_models(model) / "model.safetensors")
    packed_copy = tensors["model.embed_tokens.weight"].numel() if "lm_head.weight" not in tensors else 0
    assert plan.weight_bytes == 4 * (sum(tensor.numel() for tensor in tensors.values()) + packed_copy)
    assert (plan.dtype, plan.device, plan.problem) == ("float32", "cpu", None)


def test_a_plan_needs_the_config_only(tiny_models, tmp_path):
    """K and V of 4 layers with 2 KV heads of 32 numbers."""
    shutil.copy(tiny_models("llama") / "config.json", tmp_path)
    full = plan_model(EngineConfig(str(tmp_path), device="cpu", num_pages=10))
    half = plan_model(EngineConfig(str(tmp_path), device="cpu", num_pages=10, dtype="bfloat16"))
    assert (full.kv_bytes_per_token, half.kv_bytes_per_token) == (2 * 4 * 2 * 32 * 4, 2 * 4 * 2 * 32 * 2)
    assert half.weight_bytes * 2 == full.weight_bytes


def test_a_model_that_is_too_large_is_told_with_the_numbers(tiny_models, tmp_path, capsys):
    config = json.loads((tiny_models("llama") / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 80}))
    plan = plan_model(EngineConfig(str(tmp_path), device="cpu"))
    assert plan.num_pages == 0
    assert "--memory-ratio" in plan.problem
    assert main(["doctor", str(tmp_path), "--device", "cpu"]) == 1
    assert f"does not fit: {plan.problem[:20]}" in capsys.readouterr().out


def test_the_report_names_packages_devices_backends_and_the_plan(tiny_models, capsys):
    assert main(["doctor", str(tiny_models("llama")), "--device", "cpu", "--page-size", "8", "--num-pages", "12"]) == 0
    shown = capsys.readouterr().out
    for part in ("packages", "devices", "attention backends", "memory plan", torch.__version__, "KV per token         2,048 bytes"):
        assert part in shown
    assert "96 tokens in 12 pages of 8" in shown
    assert "one request is limited to 96 tokens by the pool" in shown


def test_without_a_model_there_is_no_plan_and_nothing_is_fetched(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    assert main(["doctor"]) == 0
    assert "memory plan" not in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_every_registered_backend_is_tried():
    assert [backend.name for backend in probe_backends()] == sorted(ATTENTION_BACKENDS)
    assert {backend.name: backend.why_not for backend in probe_backends()}["torch"] is None


class NotHere(TorchAttention):
    def prepare(self, batch):
        raise ImportError("no library called nothing")


class Wrong(TorchAttention):
    def forward(self, q, k, v, layer, metadata):
        return super().forward(q, k, v, layer, metadata) * 2


def test_a_backend_that_cannot_be_used_says_why(monkeypatch, capsys):
    monkeypatch.setitem(ATTENTION_BACKENDS, "not-here", NotHere)
    monkeypatch.setitem(ATTENTION_BACKENDS, "wrong", Wrong)
    found = {backend.name: backend.why_not for backend in probe_backends()}
    assert found["not-here"] == "ImportError: no library called nothing"
    assert found["wrong"].startswith("wrong result")
    assert main(["doctor"]) == 0
    assert "not-here             not usable: ImportError: no library called nothing" in capsys.readouterr().out


def test_a_package_that_is_not_installed_has_no_version():
    assert installed("torch") == torch.__version__
    assert installed("no-such-distribution") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_is_refused(tiny_models, capsys):
    with pytest.raises(ConfigError, match="--device cuda"):
        plan_model(EngineConfig(str(tiny_models("llama")), device="cuda"))
    assert main(["doctor", str(tiny_models("llama")), "--device", "cuda"]) == 2


def test_a_model_that_cannot_be_read_is_an_error(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_everything_that_the_package_requires_is_looked_for():
    requirements = [entry for entry in requires("minisgl") or [] if "extra ==" not in entry]
    names = {re.split(r"[^\w-]", entry)[0].lower().replace("-", "_") for entry in requirements}
    assert {"torch", "uvicorn", "pyyaml"} <= names
    assert names <= {name.replace("-", "_") for name in (*REQUIRED, *OPTIONAL)}
