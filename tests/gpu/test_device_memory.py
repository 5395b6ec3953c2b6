"""What the engine takes of a GPU's memory, and what it says where there is too little."""

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.errors import ConfigError
from minisgl.kernel.gpu.prefill_attention import shared_bytes
from minisgl.llm import LLM

pytestmark = pytest.mark.gpu


def test_graphs_of_all_sizes_share_one_stream_and_its_workspace(tiny_models, monkeypatch):
    real, devices = torch.cuda.Stream, []

    def stream(*args, **options):
        devices.extend(args)
        return real(*args, **options)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(tiny_models("llama"), dtype="bfloat16", device="cuda", num_pages=64, max_running_req=16) as llm:
        for count in (1, 2, 4, 7, 16):
            results = llm.generate([[5, 6, 7]] * count, params, progress=False)
            assert [result.error for result in results] == [None] * count
    assert len(devices) == 1


def test_a_pool_that_the_device_has_no_memory_for_is_refused_with_its_size(tiny_models):
    with pytest.raises(ConfigError, match=r"MiB for a KV pool of 10000000 pages; lower --num-pages"):
        LLM(tiny_models("llama"), device="cuda", num_pages=10**7)


def test_the_device_tells_the_shared_memory_of_a_program():
    assert 48 * 1024 <= shared_bytes(torch.device("cuda")) <= 256 * 1024
