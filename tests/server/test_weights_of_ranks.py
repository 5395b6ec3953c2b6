"""A rank whose weights are not those of the others keeps a server from starting; the message names the weight."""

from __future__ import annotations

import os

import pytest

from tests.server.server_process import START_S, server_process

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_norm_that_differs_between_ranks_is_named_before_anything_is_served(tiny_models, rank):
    name = "model.layers.1.input_layernorm.weight"
    environment = {"FAULT": f"weight:{name}", "FAULTY_RANK": str(rank), "ENGINE": "real"}
    with server_process(tiny_models("llama"), scheduler="tests.server.faulty_rank_process", options={"tp": 2}, **environment) as server:
        assert server.wait_for_exit(START_S) == 1
        assert server.url == ""
        assert f"the ranks have loaded different values of {name}, digests " in server.stderr
        assert server.leaves_nothing_behind()
