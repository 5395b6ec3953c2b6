"""The tokenizer that a GGUF file carries. The embedded model's: 20 strings with their ids, and an encoder written out in the tests."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.errors import FetchError, ModelFormatError
from minisgl.models.embedded import embedded_model_path
from minisgl.tokenizer import load_tokenizer
from minisgl.tokenizer.gguf_vocab import gguf_end_ids, gguf_tokenizer_files
from tests.tokenizer.byte_pairs import BytePairs
from tests.tokenizer.fakes import byte_chars

SMOLLM2_IDS = [
    ("The capital of France is Paris.", [504, 3575, 282, 4649, 314, 7042, 30]),
    ("Hello, world!", [19556, 28, 905, 17]),
    ("12345", [33, 34, 35, 36, 37]),
    ("In 2024, 3 cats.", [788, 216, 34, 32, 34, 36, 28, 216, 35, 7680, 30]),
    ("3.14159", [35, 30, 33, 36, 33, 37, 41]),
    (" 42 ", [216, 36, 34, 216]),
    ("a1b2c3", [81, 33, 82, 34, 83, 35]),
    ("x = 10**6 + 7", [104, 446, 216, 33, 32, 828, 38, 1232, 216, 39]),
    ("It's we'll I'VE don't", [1589, 506, 392, 3060, 339, 23, 18525, 1326, 982]),
    ("  two  spaces   three", [216, 827, 216, 5600, 256, 1296]),
    ("line one\nline two\n\n\tindented", [1311, 582, 198, 1311, 827, 1116, 197, 526, 6574]),
    ("café naïve Zürich", [83, 1939, 2756, 15486, 46494, 1777, 7170, 5130]),
    ("你好，世界", [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230]),
    ("Привет, мир!", [155, 249, 46879, 16464, 32547, 28, 41337, 7872, 9175, 17]),
    ("👍🏽 🤗", [10813, 235, 231, 10813, 233, 138, 15107, 114, 241]),
    ("<|im_start|>user\nHi<|im_end|>", [1, 4093, 198, 26843, 2]),
    ("Ⅷ ½ ٣٤", [173, 223, 117, 216, 16738, 216, 164, 113, 164, 114]),
    ("", []),
    ("    def f(x):\n        return x  ", [333, 753, 275, 24, 104, 727, 448, 1003, 1792, 256]),
    ("https://example.org/?q=1&r=22", [4687, 1742, 7434, 30, 2295, 35005, 97, 45, 33, 22, 98, 45, 34, 34]),
]
CHAT_IDS = [
    *[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198],
    *[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
]


@pytest.fixture(scope="module")
def smollm2_dir():
    try:
        return embedded_model_path()
    except FetchError as error:
        pytest.skip(f"the embedded model is not at hand: {error}")


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return load_tokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def by_hand(smollm2_dir):
    raw = json.loads((smollm2_dir / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [" ".join(pair) for pair in raw["model"]["merges"]]
    return BytePairs(raw["model"]["vocab"], merges, [token["content"] for token in raw["added_tokens"]])


def test_smollm2_has_the_vocabulary_of_its_makers(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == set(range(17))
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == {2}


def test_the_bytes_that_smollm2_lacks_are_control_characters_or_in_no_assigned_text(by_hand):
    lacking = {byte for byte, char in enumerate(by_hand.chars) if char not in by_hand.vocab}
    assert {byte for byte in lacking if byte > 0x1F} <= {0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
    assert not lacking & set(b"\t\n\r")


@pytest.mark.parametrize(("text", "ids"), SMOLLM2_IDS, ids=range(len(SMOLLM2_IDS)))
def test_smollm2_ids(smollm2, by_hand, text, ids):
    assert smollm2.encode(text) == ids
    assert by_hand.encode_smollm(text) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_chat_ids(smollm2):
    assert smollm2.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}]) == CHAT_IDS


@given(st.text(max_size=30) | st.text("aé1٣½ 世\n\t'st.<|im_end|>", max_size=30))
@settings(max_examples=200, deadline=None)
def test_smollm2_ids_equal_the_encoder_written_out(smollm2, by_hand, text):
    assert smollm2.encode(text) == by_hand.encode_smollm(text)


def metadata(**changes):
    tokens = ["<|bos|>", "<tool>", *byte_chars(), "12", "[PAD]"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4, *[1] * 257, 5],
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    values |= {f"tokenizer.{key}": value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


def load(tmp_path, values):
    for name, content in zip(("tokenizer", "tokenizer_config"), gguf_tokenizer_files(values, "m.gguf"), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("pre", "add_bos", "ids"),
    [
        ("llama-bpe", None, [0, 258]),
        ("llama-bpe", False, [258]),
        ("qwen2", None, [2 + ord("1"), 2 + ord("2")]),
        ("qwen2", True, [0, 2 + ord("1"), 2 + ord("2")]),
        ("smollm", None, [2 + ord("1"), 2 + ord("2")]),
    ],
)
def test_bos_and_digits_go_by_kind_and_by_the_file(tmp_path, pre, add_bos, ids):
    changes = {"ggml.pre": pre, "ggml.add_bos_token": add_bos}
    assert load(tmp_path, metadata(**changes)).encode("12") == ids


def test_control_tokens_are_hidden_and_user_defined_ones_shown(tmp_path):
    tokenizer = load(tmp_path, metadata())
    assert tokenizer.encode("<tool><|bos|>", add_special_tokens=False) == [1, 0]
    assert tokenizer.decode([1, 0]) == "<tool>"
    assert tokenizer.special_ids == {0}


def test_named_templates_of_a_file(tmp_path):
    values = metadata(**{"chat_templates": ["tool_use"], "chat_template": "plain", "chat_template.tool_use": "tools"})
    tokenizer = load(tmp_path, values)
    chat = [{"role": "user", "content": ""}]
    assert (tokenizer.render_chat(chat), tokenizer.render_chat(chat, tools=[{}])) == ("plain", "tools")


def test_end_ids_are_those_of_sequence_turn_and_message():
    tokens = {"tokenizer.ggml.tokens": list("abcd")}
    ids = {f"tokenizer.ggml.{name}_token_id": place for place, name in enumerate(["eos", "eot", "eom", "bos"])}
    assert gguf_end_ids(tokens | ids, "m.gguf") == [0, 1, 2]
    assert gguf_end_ids(tokens, "m.gguf") == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml.model": "llama"}, r"tokenizer.ggml.model='llama'"),
        ({"ggml.pre": None}, r"tokenizer.ggml.pre=None is not supported"),
        ({"ggml.pre": "gpt-4o"}, r"tokenizer.ggml.pre='gpt-4o'.*'llama-bpe', 'qwen2', 'smollm'"),
        ({"ggml.add_eos_token": True}, r"tokenizer.ggml.add_eos_token is true"),
        ({"ggml.tokens": None}, "must be lists of one length"),
        ({"ggml.token_type": [1]}, "must be lists of one length"),
        ({"ggml.tokens": ["a"] * 260}, "lists a token twice"),
        ({"ggml.merges": None}, "merges"),
        ({"ggml.merges": ["a b c"]}, "merges"),
        ({"ggml.bos_token_id": 260}, "tokenizer.ggml.bos_token_id is 260; the vocabulary has 260 tokens"),
    ],
)
def test_what_cannot_be_right_is_refused(changes, words):
    with pytest.raises(ModelFormatError, match=words):
        gguf_tokenizer_files(metadata(**changes), "m.gguf")
