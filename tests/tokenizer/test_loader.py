"""Tokenizers from model directories: ids as tokenizer.json says, end ids from all files, errors that name the file."""

import json

import pytest
import tokenizers
from tokenizers import processors

from minisgl.errors import ModelFormatError, RequestError
from minisgl.tokenizer import load_tokenizer
from tests.tokenizer import fakes

CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def write(tmp_path):
    """Write a model directory: a backend, and JSON files by name."""

    def _write(backend, **files):
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, value in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
        return tmp_path

    return _write


def test_special_tokens_are_added_as_tokenizer_json_says(write):
    backend = fakes.sentence_piece()
    tokenizer = load_tokenizer(write(backend))
    assert tokenizer.encode("a.") == backend.encode("a.").ids
    assert tokenizer.encode("a.")[0] == 1
    assert tokenizer.encode("a.", add_special_tokens=False) == backend.encode("a.").ids[1:]


def test_truncation_and_padding_of_the_file_do_not_apply(write):
    backend = fakes.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    assert load_tokenizer(write(backend)).encode("abcdefgh") == list(b"abcdefgh")


def test_end_ids_are_the_union_of_three_files(write):
    directory = write(
        fakes.byte_level(specials=["<|end|>", "<|turn|>"]),
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [6, 7]},
        tokenizer_config={"eos_token": {"content": "<|turn|>", "__type": "AddedToken"}},
    )
    assert load_tokenizer(directory).eos_token_ids == {5, 6, 7, 257}


@pytest.mark.parametrize("value", [None, []])
def test_null_or_no_end_ids_are_none(write, value):
    tokenizer = load_tokenizer(write(fakes.byte_level(), config={"eos_token_id": value}, generation_config={}))
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize("value", ["2", True, -1, [1, None], 1.5])
def test_end_ids_that_are_no_ids_are_refused(write, value):
    with pytest.raises(ModelFormatError, match=r"generation_config.json: eos_token_id"):
        load_tokenizer(write(fakes.byte_level(), generation_config={"eos_token_id": value}))


def test_vocab_size_counts_up_to_the_highest_id(write):
    assert load_tokenizer(write(fakes.byte_level(specials=["<|a|>", "<|b|>"]))).vocab_size == 258


def test_tokens_named_in_the_config_are_hidden_though_tokenizer_json_calls_them_plain(write):
    backend = fakes.byte_level(specials=[])
    backend.add_tokens(["<|end|>", "<|more|>", "<think>"])
    directory = write(backend, tokenizer_config={"eos_token": "<|end|>", "additional_special_tokens": ["<|more|>"]})
    assert load_tokenizer(directory).decode([ord("a"), 256, 257, 258]) == "a<think>"


def test_tokens_that_only_the_config_lists_are_added(write):
    listed = {"256": {"content": "<|end|>", "special": True}, "257": {"content": "<|late|>", "special": True, "lstrip": False}}
    tokenizer = load_tokenizer(write(fakes.byte_level(), tokenizer_config={"added_tokens_decoder": listed}))
    assert tokenizer.encode("<|late|>") == [257]
    assert tokenizer.decode([257]) == ""


def test_tokens_of_the_config_that_leave_a_gap_are_refused(write):
    listed = {"300": {"content": "<|late|>", "special": True}}
    with pytest.raises(ModelFormatError, match="id 300, which does not continue"):
        load_tokenizer(write(fakes.byte_level(), tokenizer_config={"added_tokens_decoder": listed}))


def test_a_missing_tokenizer_json_is_named(tmp_path):
    with pytest.raises(ModelFormatError, match=r"tokenizer.json: not found"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}', '{"version": "1.0", "model": {"type": "Strange"}}'])
def test_a_malformed_tokenizer_json_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_malformed_config_is_named(write, text):
    directory = write(fakes.byte_level())
    (directory / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"tokenizer_config.json"):
        load_tokenizer(directory)


@pytest.mark.parametrize("text", ["cut \ud83d", "\udc00", "a\ud83db"])
def test_an_unpaired_surrogate_is_refused(text):
    with pytest.raises(RequestError, match="unpaired surrogate") as caught:
        fakes.ours(fakes.byte_level()).encode(text)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_a_chat_has_exactly_one_bos(write):
    backend = fakes.sentence_piece()
    assert isinstance(backend.post_processor, processors.TemplateProcessing)
    tokenizer = load_tokenizer(write(backend, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a."}])
    assert ids.count(1) == 1
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.render_chat([{"role": "user", "content": "a."}]) == "<s>[user]a.</s>"


def test_template_files_go_in_order(write):
    directory = write(fakes.byte_level(), chat_template={"chat_template": "third"})
    chat = [{"role": "user", "content": ""}]
    assert load_tokenizer(directory).render_chat(chat) == "third"
    write(fakes.byte_level(), tokenizer_config={"chat_template": "second"})
    assert load_tokenizer(directory).render_chat(chat) == "second"
    (directory / "chat_template.jinja").write_text("first")
    assert load_tokenizer(directory).render_chat(chat) == "first"


def test_named_templates(write):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = load_tokenizer(write(fakes.byte_level(), tokenizer_config={"chat_template": named}))
    chat = [{"role": "user", "content": ""}]
    assert tokenizer.render_chat(chat) == "plain"
    assert tokenizer.render_chat(chat, tools=[{}, {}]) == "2 tools"


@pytest.mark.parametrize("value", [3, [], ["x"], [{"name": "default"}], {}])
def test_a_template_that_is_no_text_is_refused(write, value):
    with pytest.raises(ModelFormatError, match=r"tokenizer_config.json: chat_template"):
        load_tokenizer(write(fakes.byte_level(), tokenizer_config={"chat_template": value}))


def test_a_template_that_is_no_jinja_is_refused(write):
    with pytest.raises(ModelFormatError, match=r"tokenizer_config.json: the chat template is not valid Jinja"):
        load_tokenizer(write(fakes.byte_level(), tokenizer_config={"chat_template": "{% if %}"}))


def test_no_template_is_an_error_that_says_so():
    tokenizer = fakes.ours(fakes.byte_level())
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


def test_ids_equal_the_librarys_for_many_texts(write):
    backend = fakes.byte_level()
    tokenizer = load_tokenizer(write(backend))
    for text in ("", " ", "a <|end|> b", "👨‍👩‍👧", "\x00\n"):
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert isinstance(backend, tokenizers.Tokenizer)
