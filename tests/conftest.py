"""Fixtures for all tests, and the thread settings that keep tiny models fast: set before torch is first imported.

An idle torch thread spins; a tiny model's step takes 5 ms with one thread and 60 ms with two beside another process.
"""

import os

# Programs that the tests start inherit these too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch

from tests.tools.tiny_models import TinyModels, default_root

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_models() -> TinyModels:
    """`tiny_models(name)` is the directory of a tiny model: llama, qwen2, qwen3, qwen3-moe or mistral; built when first asked for."""
    return TinyModels(default_root())


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The directory of the embedded model (SmolLM2-135M-Instruct), fetched and converted on the first use."""
    from minisgl.models.embedded import embedded_model_path

    return Path(embedded_model_path())
