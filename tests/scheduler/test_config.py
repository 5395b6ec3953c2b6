"""Settings are checked values; the addresses follow from the suffix alone; ranks know who they are."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from minisgl.distributed import DistributedInfo
from minisgl.engine.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.scheduler import SchedulerConfig
from minisgl.utils import run_directory

ADDRESSES = ("zmq_backend_addr", "zmq_detokenizer_addr", "zmq_scheduler_broadcast_addr", "zmq_frontend_addr")


def make(**changes):
    return SchedulerConfig(**{"model_path": "unused", "_unique_suffix": "test", **changes})


def addresses(config):
    return [getattr(config, name) for name in ADDRESSES] + [str(config.rendezvous_path)]


def test_a_config_needs_no_argument_and_no_model():
    config = SchedulerConfig()
    assert (config.model_path, config.tp_info, config.dtype, config.offline_mode) == (None, DistributedInfo(0, 1), "auto", False)
    assert make(model_path="/there/is/nothing/here").model_path == "/there/is/nothing/here"


def test_construction_and_addresses_touch_no_disk_and_load_no_torch():
    program = """
import builtins, os, sys
from minisgl.distributed import DistributedInfo
from minisgl.scheduler.config import SchedulerConfig
touched = []
watched = ("open", "os.mkdir", "os.remove", "os.rename", "os.listdir", "os.scandir", "socket.connect", "socket.bind")
sys.addaudithook(lambda event, arguments: touched.append(event) if event in watched else None)
config = SchedulerConfig(model_path="unused", tp_info=DistributedInfo(1, 2), dtype="float32", _unique_suffix="quiet")
config.zmq_backend_addr, config.zmq_detokenizer_addr, config.zmq_scheduler_broadcast_addr, config.zmq_frontend_addr, config.rendezvous_path
print(touched, "torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[] False"


def test_addresses_are_distinct_and_a_pure_function_of_the_suffix():
    first, second = make(), make(tp_info=DistributedInfo(1, 4), dtype="bfloat16", page_size=1)
    assert addresses(first) == addresses(second)
    assert len(set(addresses(first))) == 5
    assert not set(addresses(first)) & set(addresses(make(_unique_suffix="other")))
    program = "from minisgl.scheduler import SchedulerConfig; print(SchedulerConfig(_unique_suffix='test').zmq_backend_addr)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": "/var", "XDG_RUNTIME_DIR": "/var", "HOME": "/"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == first.zmq_backend_addr


def test_each_config_draws_its_own_suffix_and_copies_keep_it():
    config = SchedulerConfig()
    assert config._unique_suffix != SchedulerConfig()._unique_suffix
    assert dataclasses.replace(config, seed=1)._unique_suffix == config._unique_suffix
    assert dataclasses.replace(config, _unique_suffix="mine").zmq_backend_addr == f"ipc://{run_directory()}/mine.backend"


def test_a_suffix_that_does_not_fit_into_a_socket_path_is_refused_with_the_allowed_length():
    with pytest.raises(ConfigError, match=r"500 characters found, (\d+) are allowed") as refused:
        make(_unique_suffix="x" * 500)
    num_allowed = int(str(refused.value).split("characters found, ")[1].split()[0])
    longest = make(_unique_suffix="x" * num_allowed)
    assert max(len(os.fsencode(address.removeprefix("ipc://"))) for address in addresses(longest)) == 107
    with pytest.raises(ConfigError):
        make(_unique_suffix="x" * (num_allowed + 1))


@pytest.mark.parametrize("suffix", ["", "a/b", "../up", "a b", "a\0", "a\nb", "ä", 5, None])
def test_a_suffix_that_is_no_file_name_is_refused(suffix):
    with pytest.raises(ConfigError, match="_unique_suffix"):
        make(_unique_suffix=suffix)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        ("torch.bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("auto", "auto"),
    ],
)
def test_a_dtype_is_given_as_torch_dtype_or_name_and_read_as_the_name(dtype, name):
    assert make(dtype=dtype).dtype == name
    assert make(dtype=dtype) == make(dtype=name)


BAD = [
    ("model_path", ""),
    ("model_path", 5),
    ("tp_info", (0, 1)),
    ("dtype", torch.int8),
    ("dtype", "float64"),
    ("dtype", None),
    ("device", "tpu"),
    ("device", 0),
    ("page_size", -1),
    ("page_size", 16.0),
    ("page_size", True),
    ("num_pages", -5),
    ("num_pages", 2**31),
    ("max_running_req", 0),
    ("max_running_req", "8"),
    ("max_seq_len", -1),
    ("max_seq_len", 1),
    ("attention_backend", ""),
    ("attention_backend", None),
    ("use_dummy_weight", 1),
    ("seed", -1),
    ("seed", 2**63),
    ("memory_ratio", -0.1),
    ("memory_ratio", 1.01),
    ("memory_ratio", float("nan")),
    ("memory_ratio", "0.9"),
    ("memory_ratio", True),
    ("max_extend_tokens", -1),
    ("max_extend_tokens", 1.5),
    ("cache_type", "lru"),
    ("offline_mode", "yes"),
    ("backend_create_detokenizer_link", None),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r}" for name, value in BAD])
def test_a_value_that_cannot_be_honoured_is_refused_by_field_and_value(name, value):
    with pytest.raises(ConfigError) as refused:
        make(**{name: value})
    assert name in str(refused.value)
    assert repr(value) in str(refused.value) or str(value).removeprefix("torch.") in str(refused.value)
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(make(), **{name: value})


def test_offline_mode_runs_on_one_rank():
    assert make(offline_mode=True).offline_mode
    with pytest.raises(ConfigError, match="2 ranks"):
        make(offline_mode=True, tp_info=DistributedInfo(0, 2))


def test_a_config_is_a_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().seed = 1
    assert make() == make()
    assert len({make(), make()}) == 1
    assert dataclasses.replace(make(), tp_info=DistributedInfo(1, 2)).tp_info.rank == 1
    assert isinstance(make(), EngineConfig)


def test_rank_0_alone_is_primary():
    assert [DistributedInfo(rank, 3).is_primary() for rank in range(3)] == [True, False, False]
    assert DistributedInfo(rank=1, size=2) == DistributedInfo(1, 2)


@pytest.mark.parametrize(("rank", "size"), [(-1, 1), (1, 1), (4, 4), (0, 0), (0, -1), (0.0, 1), ("0", 1), (False, 1), (0, True), (0, None)])
def test_a_rank_outside_its_group_is_a_value_error(rank, size):
    with pytest.raises(ValueError, match="found") as refused:
        DistributedInfo(rank, size)
    assert isinstance(refused.value, ConfigError)


def test_unknown_names_of_lazy_packages_are_attribute_errors():
    import minisgl.distributed
    import minisgl.scheduler

    for package in (minisgl.distributed, minisgl.scheduler):
        with pytest.raises(AttributeError, match="nothing_like_this"):
            _ = package.nothing_like_this
        assert all(getattr(package, name).__name__ == name for name in package.__all__)
