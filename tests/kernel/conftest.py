"""Triton kernels are tested on the GPU, or, without one, in Triton's interpreter. Decorated functions read the variable when imported."""

import importlib.util
import os

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_gpu_*.py", "test_launch.py"]

if not torch.cuda.is_available() and not collect_ignore_glob:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.tools.triton_interpreter import install

    install()


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
