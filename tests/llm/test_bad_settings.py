"""Settings and files that cannot be honoured are refused with a message, never with a traceback of ours."""

import json
import shutil

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import ConfigError, ModelFormatError
from minisgl.llm import LLM
from minisgl.models.config import parse_model_config
from minisgl.tokenizer.loader import load_tokenizer


@pytest.fixture
def model_dir(tiny_models, tmp_path):
    return shutil.copytree(tiny_models("llama"), tmp_path / "model")


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("added_tokens_decoder", {"x": {"content": "<x>"}}),
        ("added_tokens_decoder", ["a"]),
        ("added_tokens_decoder", {"5000": {}}),
        ("added_tokens_decoder", {"5000": "<x>"}),
        ("additional_special_tokens", 5),
        ("additional_special_tokens", "<x>"),
    ],
)
def test_malformed_token_lists_are_refused_by_name(model_dir, field, value):
    change(model_dir / "tokenizer_config.json", **{field: value})
    with pytest.raises(ModelFormatError, match=field):
        load_tokenizer(model_dir)


def test_a_chat_template_that_is_not_utf8_is_refused(model_dir):
    (model_dir / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(ModelFormatError, match="UTF-8"):
        load_tokenizer(model_dir)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 10**400),
        ("rope_theta", float("inf")),
        ("hidden_size", 10**30),
        ("vocab_size", 10**15),
        ("max_position_embeddings", 10**12),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e308}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0.0001}),
    ],
)
def test_numbers_beyond_reason_are_refused_by_name(model_dir, field, value):
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ModelFormatError, match=field if field != "rope_scaling" else "factor"):
        parse_model_config(raw | {"rope_scaling": None, field: value})


def test_a_pool_that_the_system_does_not_give_is_refused_with_its_size(model_dir):
    with pytest.raises(ConfigError, match=r"MiB for a KV pool of 1000000000 pages; lower --num-pages"):
        LLM(model_dir, num_pages=10**9)


@pytest.mark.parametrize("params", [{"logit_bias": {4096: 1.0}}, {"stop_token_ids": [2**31 - 1]}])
def test_token_ids_that_the_model_does_not_have_are_refused(model_dir, params):
    with LLM(model_dir, num_pages=32) as llm:
        result = llm.generate(["hi"], SamplingParams(max_tokens=2, **params))[0]
    assert result.finish_reason == "error"
    assert f"{next(iter(params))}: token id" in result.error
