"""Loading: nothing missing, nothing extra, nothing outside the directory, cut by name, one tensor at a time."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import DistributedInfo
from minisgl.engine.config import EngineConfig
from minisgl.engine.engine import make_engine
from minisgl.errors import ConfigError, ModelFormatError
from minisgl.layers.base import Spec
from minisgl.layers.embedding import vocab_block
from minisgl.models.config import parse_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import digest_whole, fill_dummy, load_weights, shard_range
from tests.models.small import LLAMA, MOE, QWEN3

ONE = DistributedInfo(0, 1)
CPU = torch.device("cpu")
TIED = LLAMA | {"tie_word_embeddings": True}
BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}


def make_model(config, tp=ONE, dtype=torch.float32):
    return CausalLM(parse_model_config(config), Spec(dtype, CPU, tp))


def checkpoint(config, seed=0):
    """Name -> tensor, as a checkpoint of that config holds them."""
    model = make_model(config)
    fill_dummy(model, seed)
    return {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}


def write(model_dir, tensors, config=LLAMA, file="model.safetensors"):
    model_dir.mkdir(exist_ok=True)
    save_file(tensors, model_dir / file)
    (model_dir / "config.json").write_text(json.dumps(config))


def write_sharded(model_dir, tensors, config=LLAMA, num_shards=3):
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + index % num_shards:05}-of-{num_shards:05}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        write(model_dir, {name: tensors[name] for name in names if weight_map[name] == file}, config, file)
    write_index(model_dir, weight_map)
    return weight_map


def write_index(model_dir, weight_map):
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(model_dir, config=LLAMA, tp=ONE, dtype=torch.float32):
    model = make_model(config, tp, dtype)
    load_weights(model, model_dir, parse_model_config(config), tp)
    return model.state_dict()


def assert_loaded(model_dir, tensors, config=LLAMA):
    loaded = load(model_dir, config)
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("config", [LLAMA, TIED, BIASED, QWEN3, MOE], ids=["llama", "tied", "biased", "qwen3", "moe"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_every_tensor_arrives(tmp_path, config, is_sharded):
    tensors = checkpoint(config)
    (write_sharded if is_sharded else write)(tmp_path / "m", tensors, config)
    assert_loaded(tmp_path / "m", tensors, config)


def test_checkpoint_types_are_converted(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint(LLAMA).items()}
    write(tmp_path / "m", tensors)
    loaded = load(tmp_path / "m")
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in tensors.items())


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    tensors = checkpoint(LLAMA)
    write(tmp_path / "m", tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    assert_loaded(tmp_path / "m", tensors)


# What is refused.

SOME = "model.layers.1.mlp.up_proj.weight"


def test_a_missing_tensor_is_named(tmp_path):
    tensors = checkpoint(LLAMA)
    del tensors[SOME]
    write(tmp_path / "m", tensors)
    with pytest.raises(ModelFormatError, match=f"1 missing: {SOME}"):
        load(tmp_path / "m")


def test_an_unexpected_tensor_is_named(tmp_path):
    write(tmp_path / "m", checkpoint(LLAMA) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(12)})
    with pytest.raises(ModelFormatError, match=r"1 unexpected: model.layers.0.self_attn.q_norm.weight"):
        load(tmp_path / "m")


def test_many_missing_tensors_are_counted(tmp_path):
    write(tmp_path / "m", {"lm_head.weight": checkpoint(LLAMA)["lm_head.weight"]})
    with pytest.raises(ModelFormatError, match=r"38 missing: model.embed_tokens.weight, .* and 28 more"):
        load(tmp_path / "m")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    write(tmp_path / "m", checkpoint(LLAMA) | {SOME: torch.zeros(80, 47)})
    with pytest.raises(ModelFormatError, match=rf"model.safetensors: {SOME}: shape \[80, 47\] found, .* asks for \[80, 48\]"):
        load(tmp_path / "m")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool])
def test_integer_tensors_are_refused(tmp_path, dtype):
    write(tmp_path / "m", checkpoint(LLAMA) | {SOME: torch.ones(80, 48).to(dtype)})
    with pytest.raises(ModelFormatError, match=f"{SOME} has type {dtype}, a floating-point type is wanted"):
        load(tmp_path / "m")


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path, num_bytes):
    write(tmp_path / "m", checkpoint(LLAMA))
    path = tmp_path / "m" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:num_bytes])
    with pytest.raises(ModelFormatError, match=rf"{path}.*; the file is truncated or not safetensors"):
        load(tmp_path / "m")


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    write(tmp_path / "m", checkpoint(LLAMA))
    (tmp_path / "m" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelFormatError, match=r"model.safetensors.*truncated or not safetensors"):
        load(tmp_path / "m")


def test_an_index_that_names_a_missing_shard(tmp_path):
    write_sharded(tmp_path / "m", checkpoint(LLAMA))
    (tmp_path / "m" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"index.json names files that are not there: model-00002-of-00003.safetensors"):
        load(tmp_path / "m")


def test_an_index_that_lies_about_a_tensor(tmp_path):
    weight_map = write_sharded(tmp_path / "m", checkpoint(LLAMA))
    other = next(file for file in weight_map.values() if file != weight_map[SOME])
    write_index(tmp_path / "m", weight_map | {SOME: other})
    with pytest.raises(ModelFormatError, match=f"says that {SOME} is in {other}, which does not hold it"):
        load(tmp_path / "m")


@pytest.mark.parametrize("path", ["../outside.safetensors", "{absolute}", "sub/../../outside.safetensors", 7, None])
def test_an_index_that_leads_out_of_the_directory(tmp_path, path):
    tensors = checkpoint(LLAMA)
    weight_map = write_sharded(tmp_path / "m", tensors)
    save_file(tensors, tmp_path / "outside.safetensors")
    found = str(tmp_path / "outside.safetensors") if path == "{absolute}" else path
    write_index(tmp_path / "m", weight_map | {SOME: found})
    with pytest.raises(ModelFormatError, match=r"names the file .*; files of the model's own directory are allowed"):
        load(tmp_path / "m")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
def test_an_index_that_is_none(tmp_path, content):
    write_sharded(tmp_path / "m", checkpoint(LLAMA))
    (tmp_path / "m" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelFormatError, match=r"index.json is not an index of weights"):
        load(tmp_path / "m")


def test_an_index_without_tensors_loads_nothing(tmp_path):
    write_sharded(tmp_path / "m", checkpoint(LLAMA))
    write_index(tmp_path / "m", {})
    with pytest.raises(ModelFormatError, match="is missing"):
        load(tmp_path / "m")


def test_an_empty_directory(tmp_path):
    with pytest.raises(ModelFormatError, match=rf"{tmp_path} holds no .safetensors file$"):
        load(tmp_path)


def test_a_directory_of_bin_files(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFormatError, match=r"no .safetensors file; found pytorch_model.bin, which is not read"):
        load(tmp_path)


def test_several_files_without_an_index(tmp_path):
    write_sharded(tmp_path / "m", checkpoint(LLAMA))
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFormatError, match=r"3 safetensors files .* and no model.safetensors.index.json"):
        load(tmp_path / "m")


def test_strays_beside_an_index_are_ignored(tmp_path):
    tensors = checkpoint(LLAMA)
    write_sharded(tmp_path / "m", tensors)
    save_file(checkpoint(LLAMA, seed=1), tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "consolidated.safetensors").write_bytes(b"junk")
    assert_loaded(tmp_path / "m", tensors)


def test_other_files_beside_model_safetensors_are_ignored(tmp_path):
    tensors = checkpoint(LLAMA)
    write(tmp_path / "m", tensors)
    (tmp_path / "m" / "consolidated.safetensors").write_bytes(b"junk")
    assert_loaded(tmp_path / "m", tensors)


def test_nothing_is_served_from_a_model_that_does_not_load(tmp_path):
    """The engine's constructor function refuses; the message is what the user sees."""
    tensors = checkpoint(LLAMA)
    del tensors[SOME]
    write(tmp_path / "m", tensors)
    with pytest.raises(ModelFormatError, match=f"the weights do not fit the model; 1 missing: {SOME}"):
        make_engine(EngineConfig(model_path=str(tmp_path / "m"), device="cpu", num_pages=8))


# Tied embeddings.


@pytest.mark.parametrize("flag", [True, False, None], ids=["true", "false", "absent"])
@pytest.mark.parametrize("has_head", [True, False], ids=["head", "no head"])
def test_tied_embeddings_in_every_mix(tmp_path, flag, has_head):
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    config |= {} if flag is None else {"tie_word_embeddings": flag}
    tensors = checkpoint(TIED) | ({"lm_head.weight": torch.full((96, 48), 7.0)} if has_head else {})
    write(tmp_path / "m", tensors, config)
    if flag:
        loaded = load(tmp_path / "m", config)
        assert "lm_head.weight" not in loaded
        assert torch.equal(loaded["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    elif has_head:
        assert torch.equal(load(tmp_path / "m", config)["lm_head.weight"], tensors["lm_head.weight"])
    else:
        with pytest.raises(ModelFormatError, match=r"lm_head.weight is missing and tie_word_embeddings is not true"):
            load(tmp_path / "m", config)


# Dummy weights.


def test_dummy_weights_need_no_files_and_have_the_stated_spread(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"hidden_size": 256}))
    engine = make_engine(EngineConfig(model_path=str(tmp_path), device="cpu", num_pages=8, use_dummy_weight=True))
    for name, tensor in engine.model.state_dict().items():
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all()), name
        else:
            assert abs(float(tensor.std()) - 0.02) < 5 * 0.02 / math.sqrt(2 * tensor.numel()), name
            assert abs(float(tensor.mean())) < 5 * 0.02 / math.sqrt(tensor.numel()), name


def test_dummy_weights_follow_their_seed():
    first, again, other = (checkpoint(LLAMA, seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if not name.endswith("norm.weight"))


# Cutting by name.


def cut(name, shape, num_kv_heads, size):
    return [shard_range(name, shape, num_kv_heads, DistributedInfo(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("layer", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.experts.3.up_proj"])
@pytest.mark.parametrize(("kind", "shape"), [("weight", [96, 40]), ("bias", [96])])
def test_outputs_are_cut_along_the_first_dimension(layer, kind, shape):
    assert cut(f"model.layers.0.{layer}.{kind}", shape, 4, 4) == [(0, 0, 24), (0, 24, 48), (0, 48, 72), (0, 72, 96)]


@pytest.mark.parametrize("layer", ["self_attn.o_proj", "mlp.down_proj", "mlp.experts.0.down_proj"])
def test_inputs_are_cut_along_the_second_dimension_and_biases_stay_whole(layer):
    assert cut(f"model.layers.0.{layer}.weight", [40, 96], 4, 2) == [(1, 0, 48), (1, 48, 96)]
    assert cut(f"model.layers.0.{layer}.bias", [40], 4, 2) == [(None, 0, 0)] * 2


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_everything_else_stays_whole(name):
    assert cut(name, [96, 40], 4, 2) == [(None, 0, 0)] * 2


@pytest.mark.parametrize("layer", ["k_proj", "v_proj"])
def test_fewer_kv_heads_than_ranks_are_replicated(layer):
    """Two heads of 8 rows over six ranks: three ranks each."""
    ranges = cut(f"model.layers.0.self_attn.{layer}.weight", [16, 40], 2, 6)
    assert ranges == [(0, 0, 8)] * 3 + [(0, 8, 16)] * 3
    assert cut(f"model.layers.0.self_attn.{layer}.bias", [16], 2, 6) == ranges


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_the_vocabulary_is_cut_into_blocks_of_any_size(name):
    assert cut(name, [1003, 8], 4, 2) == [(0, 0, 502), (0, 502, 1003)]
    assert cut(name, [1003, 8], 4, 4) == [(0, 0, 251), (0, 251, 502), (0, 502, 753), (0, 753, 1003)]


@pytest.mark.parametrize("vocab_size", [1, 5, 7, 1003, 4096])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_vocabulary_blocks_cover_every_id_once(vocab_size, size):
    blocks = [vocab_block(vocab_size, rank, size) for rank in range(size)]
    assert [i for first, end in blocks for i in range(first, end)] == list(range(vocab_size))


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "qwen3-moe"])
def test_ranks_digest_alike_what_none_of_them_cuts(config):
    first, second = (make_model(config, DistributedInfo(rank, 2)) for rank in (0, 1))
    for model in (first, second):
        fill_dummy(model, 3)
    digests = digest_whole(first)
    assert digests == digest_whole(second)
    assert "model.norm.weight" in digests
    assert not [name for name in digests if "_proj" in name or "embed" in name]
    assert ("model.layers.0.mlp.gate.weight" in digests) == (config is MOE)
    for name in digests:
        second.state_dict()[name].view(-1)[-1] += 1
        assert {changed for changed, value in digest_whole(second).items() if value != digests[changed]} == {name}
        second.state_dict()[name].copy_(first.state_dict()[name])


def test_an_uneven_cut_is_refused_with_the_numbers():
    with pytest.raises(ModelFormatError, match=r"gate_proj.weight: dimension 0 of \[80, 48\] cannot be split evenly over 3 ranks"):
        cut("model.layers.0.mlp.gate_proj.weight", [80, 48], 4, 3)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (LLAMA, 3, "4 attention heads cannot be split evenly over 3 ranks; choose another --tp"),
        (LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, 2, "3 KV heads cannot be split evenly over 2 ranks"),
        (
            LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8},
            4,
            "3 KV heads over 4 ranks: .* multiple of the heads",
        ),
        (
            LLAMA | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
            9,
            "80 MLP columns cannot be split evenly over 9 ranks",
        ),
        (MOE | {"moe_intermediate_size": 21}, 2, "21 expert columns cannot be split evenly over 2 ranks"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_numbers(config, size, message):
    with pytest.raises((ConfigError, ModelFormatError), match=message):
        make_model(config | {"num_hidden_layers": 1}, DistributedInfo(0, size))


ANY_SIZE_VOCAB = {"vocab_size": 97}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [LLAMA, TIED, BIASED, QWEN3, MOE], ids=["llama", "tied", "biased", "qwen3", "moe"])
def test_all_ranks_together_hold_every_tensor(tmp_path, config, size):
    """Each rank's parameters have the shapes that `shard_range` cuts, and put together they are the checkpoint."""
    config = config | ANY_SIZE_VOCAB
    tensors = checkpoint(config)
    write(tmp_path / "m", tensors, config)
    ranks = [load(tmp_path / "m", config, DistributedInfo(rank, size)) for rank in range(size)]
    for name, whole in tensors.items():
        own = cut(name, list(whole.shape), config["num_key_value_heads"], size)
        seen = torch.zeros_like(whole)
        for (dim, start, end), loaded in zip(own, ranks, strict=True):
            assert set(loaded) == set(tensors)
            part = whole if dim is None else whole.narrow(dim, start, end - start)
            assert torch.equal(loaded[name], part), name
            (seen if dim is None else seen.narrow(dim, start, end - start)).fill_(1)
        assert bool(seen.all()), name


MEMORY_PROGRAM = """
import json, sys, threading
import torch
from pathlib import Path
from safetensors.torch import load_file
from minisgl.distributed import DistributedInfo
from minisgl.layers.base import Spec
from minisgl.models.config import load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import load_weights

torch.set_num_threads(1)
model_dir, tp = Path(sys.argv[1]), DistributedInfo(0, 1)
config = load_model_config(model_dir)

def own_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def peak_of(work):
    before, seen, is_done = own_bytes(), [0], threading.Event()

    def watch():
        while not is_done.wait(0.0005):
            seen.append(own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    is_done.set()
    watcher.join()
    return max(*seen, own_bytes()) - before, result

def stream():
    model = CausalLM(config, Spec(torch.bfloat16, torch.device("cpu"), tp))
    load_weights(model, model_dir, config, tp)
    return model

def copy_twice():
    copies = [tensor.clone() for path in model_dir.glob("*.safetensors") for tensor in load_file(path).values()]
    return stream(), copies

streamed, model = peak_of(stream)
size = sum(tensor.nbytes for tensor in model.state_dict().values())
del model
print(json.dumps({"model": size, "streamed": streamed, "twice": peak_of(copy_twice)[0]}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_at_most_one_tensor_is_in_memory_beside_the_model(tmp_path):
    """Anonymous memory: pages of the mapped file are the kernel's cache, shared by the ranks and given up when memory is short."""
    config = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
    config |= {"num_hidden_layers": 2}
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint(config).items()}
    largest = max(tensor.nbytes for tensor in tensors.values())
    write_sharded(tmp_path / "m", tensors, config)
    command = [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path / "m")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    model, slack = found["model"], 8 * 2**20
    assert model - slack <= found["streamed"] <= model + largest + slack
    assert found["twice"] > 1.8 * model, "this measurement would not see a second copy"


def test_a_copied_directory_loads_without_the_network(tmp_path, tiny_models):
    """Only config.json and the weights are needed."""
    source = tiny_models("qwen3-moe")
    for path in (*source.glob("*.safetensors*"), source / "config.json"):
        shutil.copy(path, tmp_path)
    engine = make_engine(EngineConfig(model_path=str(tmp_path), device="cpu", num_pages=8))
    stored = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert all(torch.equal(tensor, stored[name].float()) for name, tensor in engine.model.state_dict().items())
