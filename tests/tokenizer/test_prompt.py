"""Many prompts at once: ids and errors are those of each prompt alone, in order, and no batch holds too much."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken

from minisgl.errors import RequestError
from minisgl.tokenizer import encode
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.prompt import check_token_ids, encode_prompts
from tests.tokenizer import fakes

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %} {{ mood }}"
SOURCES = {"byte level": fakes.byte_level, "sentence piece": fakes.sentence_piece, "metaspace": fakes.metaspace, "words": fakes.words}
TEXTS = ["hello there you", " ", "a. Paris is,", "世界 👨‍👩‍👧 é", "<s> a </s> <|end|>", "hello " * 300, "\x00\n", "Oslo"]
CHATS = [[{"role": "user", "content": text}] for text in ("", *TEXTS)]
IDS = [[1, 2, 3], (4,), range(2), [], [True], [1, "a"], [10**30], [-1], [1.5], [[1]]]  # not looked at
BAD = [
    *(None, 5.5, b"ab", {"a": 1}),
    *("a\ud83d", [{"role": "user", "content": "\ud83d"}], [{"role": 5}], [{}], [{"role": "user", "content": "a"}, 5]),
]


def tokenizer_of(kind: str):
    """With a chat template, and what a file may hold: padding and truncation, which do not apply."""
    backend = SOURCES[kind]()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    backend.enable_padding(length=16)
    backend.enable_truncation(4)
    return fakes.ours(backend, special_tokens={"bos_token": "<s>"}, chat_template=ChatTemplate({"default": TEMPLATE}, "here"))


def plain(outcome):
    """Comparable: ids, or all that an error says."""
    return (str(outcome), outcome.code, outcome.param, outcome.status) if isinstance(outcome, RequestError) else outcome


def mixed(*groups):
    prompts = [prompt for group in groups for prompt in group] * 3
    random.Random(5).shuffle(prompts)
    return prompts


@pytest.mark.parametrize("is_parallel", ["false", "true"])
@pytest.mark.parametrize("kind", SOURCES)
def test_many_prompts_are_encoded_as_each_alone(kind, is_parallel, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", is_parallel)
    tokenizer = tokenizer_of(kind)

    def alone(prompt):
        """The slow twin: the tokenizer's own functions for one."""
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return tokenizer.apply_chat_template(prompt) if prompt in CHATS else list(prompt)

    prompts = mixed(TEXTS, CHATS, IDS, BAD)
    outcomes = encode_prompts(prompts, tokenizer)
    assert [plain(outcome) for outcome in outcomes] == [plain(encode_prompts([prompt], tokenizer)[0]) for prompt in prompts]
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if prompt in BAD:
            assert isinstance(outcome, RequestError)
        else:
            assert outcome == alone(prompt)


@pytest.mark.parametrize("kind", SOURCES)
def test_many_chats_are_encoded_as_each_alone(kind):
    tokenizer = tokenizer_of(kind)
    prompts = mixed(CHATS, IDS, TEXTS, BAD)
    outcomes = encode_prompts(prompts, tokenizer, {"mood": "hello"})
    assert [plain(outcome) for outcome in outcomes] == [
        plain(encode_prompts([prompt], tokenizer, {"mood": "hello"})[0]) for prompt in prompts
    ]
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if prompt in CHATS:
            assert outcome == tokenizer.apply_chat_template(prompt, mood="hello") != tokenizer.apply_chat_template(prompt)
        else:
            assert isinstance(outcome, RequestError)


def test_an_error_names_its_own_prompt():
    prompts = ["a", "b\ud83d", [7], [{"role": "user", "content": 5}], "c"]
    a, surrogate, seven, malformed, c = encode_prompts(prompts, tokenizer_of("byte level"))
    assert (a, seven, c) == ([97], [7], [99])
    assert "character 1" in str(surrogate)
    assert "messages[0]" in str(malformed)


def test_without_a_tokenizer_only_ids_are_encoded():
    prompts = ["a", [1], [{"role": "user", "content": "a"}]]
    text, ids, chat = encode_prompts(prompts, None)
    assert ids == [1]
    assert "tokenizer.json" in str(text)
    assert "tokenizer.json" in str(chat)
    assert encode_prompts([], None) == []


@pytest.mark.parametrize("ids", [[], [1, True], [1, 260], [-1], [1.0], ["1"], [10**30, 0], [None]])
def test_ids_that_are_none_are_refused(ids):
    with pytest.raises(RequestError):
        check_token_ids(ids, 260)


class Watched(list):
    """Ids that are given out in slices only; the longest is noted."""

    longest = 0

    def __iter__(self):
        raise AssertionError("all ids are read by one call, and no other thread runs meanwhile")

    def __getitem__(self, place):
        part = super().__getitem__(place)
        self.longest = max(self.longest, len(part))
        return part


def test_millions_of_ids_are_checked_in_pieces_between_which_other_threads_run():
    ids = Watched([3] * 1_000_000)
    check_token_ids(ids, 260)
    assert 0 < ids.longest <= 100_000
    last = [*[3] * 999_999, 260]
    with pytest.raises(RequestError, match="260"):
        check_token_ids(last, 260)


def test_integers_of_a_type_of_their_own_are_ids():
    class Number(int):
        pass

    check_token_ids([Number(259), 0, 1], 260)
    with pytest.raises(RequestError, match="token id 260"):
        check_token_ids([0, Number(260)], 260)


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([], []),
        ([0, 0, 0], [3]),
        ([9, 9, 9, 9, 9, 9], [4, 2]),
        ([1000, 1, 1], [1, 1, 1]),
        ([40, 3], [1, 1]),
        ([3] * 10, [10]),
    ],
)
def test_no_batch_has_more_characters_than_fit_unless_it_is_one_text(lengths, batches, monkeypatch):
    monkeypatch.setattr(encode, "MOST_CHARS", 40)
    seen = []

    def encode_batch_fast(texts, add_special_tokens):
        seen.append(len(texts))
        assert add_special_tokens
        return [SimpleNamespace(ids=[len(text)]) for text in texts]

    ids = encode.encode_freely(SimpleNamespace(encode_batch_fast=encode_batch_fast), ["a" * length for length in lengths], True)
    assert ids == [[length] for length in lengths]
    assert seen == batches
