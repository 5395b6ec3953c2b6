"""Text while it arrives: never half a character, nothing twice, nothing lost, no part of a stop string."""

import itertools
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from minisgl.errors import ModelFormatError, RequestError
from minisgl.tokenizer import TextStream
from tests.tokenizer import fakes

TEXTS = ["Hello, world", "你好，世界！日本語", "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪", "é́ Привет العربية हिन्दी", "", "\u2028\x00 \n"]

BYTES = fakes.ours(fakes.byte_level())
SENTENCES = fakes.ours(fakes.sentence_piece())
METASPACE = fakes.ours(fakes.metaspace())
WORDS = fakes.ours(fakes.words())


def pieces_of(tokenizer, ids, **options) -> list[str]:
    stream = TextStream(tokenizer, **options)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@st.composite
def byte_vocabularies(draw):
    """Some text cut into tokens at random bytes, some tokens invalid, repeated and shuffled."""
    data = draw(st.sampled_from(TEXTS) | st.text(max_size=20)).encode() + draw(st.binary(max_size=4))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=8)))
    tokens = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)]) if data[start:end]]
    noise = draw(st.lists(st.binary(min_size=1, max_size=3), max_size=4))
    extra = sorted({token for token in tokens + noise if len(token) > 1})
    known = {bytes([byte]): byte for byte in range(256)} | {token: 256 + place for place, token in enumerate(extra)}
    ids = [known[token] for token in tokens]
    ids += draw(st.lists(st.integers(0, 260 + len(extra)), max_size=6))  # also the special token and ids beyond
    return extra, ids


@given(byte_vocabularies(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_joined_pieces_are_the_librarys_decode_for_byte_level(case, skips):
    extra, ids = case
    backend = fakes.byte_level(extra)
    tokenizer = fakes.ours(backend)
    expected = backend.decode(ids, skip_special_tokens=skips)
    pieces = pieces_of(tokenizer, ids, skip_special_tokens=skips)
    assert "".join(pieces) == expected == tokenizer.decode(ids, skips)
    for piece in pieces:
        piece.encode("utf-8")


@given(byte_vocabularies(), st.booleans(), st.lists(st.sampled_from(["o", "世", "\ufffd", "wo", " "]), max_size=2), st.data())
@settings(max_examples=300, deadline=None)
def test_several_tokens_at_once_show_what_they_show_one_by_one(case, skips, stops, data):
    extra, ids = case
    sentences = data.draw(st.booleans())
    tokenizer = SENTENCES if sentences else fakes.ours(fakes.byte_level(extra))
    ids = [3 + token_id for token_id in ids] if sentences else ids
    options = {"skip_special_tokens": skips, "stop": tuple(stops), "continues": data.draw(st.booleans())}
    one_by_one, at_once = TextStream(tokenizer, **options), TextStream(tokenizer, **options)
    while ids:
        size = data.draw(st.integers(0, len(ids)))
        part, ids = (ids[:size], ids[size:]) if size else (ids, [])
        assert at_once.extend(part) == "".join(one_by_one.push(token_id) for token_id in part)
        assert at_once.stopped == one_by_one.stopped
        if not at_once.stopped:
            assert at_once.num_chars == one_by_one.num_chars
    assert at_once.finish() == one_by_one.finish()


@given(st.lists(st.integers(0, 3 + 256 + len(fakes.SENTENCE_WORDS)), max_size=12), st.booleans())
@settings(max_examples=300, deadline=None)
def test_sentence_piece_decodes_as_the_library_but_for_invalid_runs(ids, skips):
    backend = fakes.sentence_piece()
    expected = backend.decode(ids, skip_special_tokens=skips)
    joined = "".join(pieces_of(SENTENCES, ids, skip_special_tokens=skips))
    assert joined == SENTENCES.decode(ids, skips)
    if "\ufffd" in expected:
        assert "\ufffd" in joined
    else:
        assert joined == expected


@given(st.lists(st.integers(0, len(fakes.SENTENCE_WORDS) + 2), max_size=8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_metaspace_decodes_as_the_library(ids, skips):
    assert METASPACE.decode(ids, skips) == fakes.metaspace().decode(ids, skip_special_tokens=skips)


@given(st.lists(st.integers(0, 5), max_size=6))
@settings(max_examples=50, deadline=None)
def test_no_decoder_joins_words_by_blanks_as_the_library(ids):
    assert "".join(pieces_of(WORDS, ids)) == fakes.words().decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_each_prefix_of_bytes_shows_whole_characters_only(text):
    ids = list(text.encode())
    stream, shown = TextStream(BYTES), ""
    for place, token_id in enumerate(ids):
        shown += stream.push(token_id)
        assert "\ufffd" not in shown
        assert shown == bytes(ids[: place + 1]).decode("utf-8", "ignore")
    assert shown + stream.finish() == text


def test_a_cjk_character_is_not_streamed_twice_when_halves_repeat():
    extra = ["A 世".encode() + b"\xe4", b"\xb8\x96a\xe4", b"\xb8\x96b"]
    backend = fakes.byte_level(extra)
    pieces = pieces_of(fakes.ours(backend), [256, 257, 258, ord("!")])
    assert pieces == ["A 世", "世a", "世b", "!", ""]


def test_4000_invalid_bytes_flow_in_linear_time():
    stream = TextStream(BYTES)
    pieces, start = [], time.perf_counter()
    for _ in range(4000):
        pieces.append(stream.push(0xFF))
    assert time.perf_counter() - start < 1
    assert set(pieces) == {"\ufffd"}
    assert stream.finish() == ""


@pytest.mark.parametrize("run", [[0xFF] * 400, [0xE4] * 400, [0xF0, 0x9F] * 200, [0x80] * 400], ids=["ff", "e4", "f09f", "80"])
def test_invalid_byte_fallback_runs_flow_with_one_mark_per_byte(run):
    ids = [3 + byte for byte in run]
    pieces = pieces_of(SENTENCES, ids)
    assert "".join(pieces) == fakes.sentence_piece().decode(ids) == "\ufffd" * len(run)
    for place in range(4, len(run)):
        assert place + 1 - len("".join(pieces[: place + 1])) <= 3


def test_an_invalid_byte_spoils_only_itself():
    ids = [3 + byte for byte in "世".encode()] + [3 + 0xFF]
    assert pieces_of(SENTENCES, ids) == ["", "", "世", "\ufffd", ""]


def test_an_unfinished_character_shows_at_the_end():
    assert pieces_of(BYTES, [0xE4, 0xB8]) == ["", "", "\ufffd"]
    assert pieces_of(SENTENCES, [3 + 0xE4, 3 + 0xB8]) == ["", "", "\ufffd\ufffd"]


def test_sentence_piece_words_keep_their_spaces_across_hidden_tokens():
    paris, rome, is_ = (fakes.sentence_piece().token_to_id(word) for word in ("▁Paris", "▁Rome", "▁is"))
    assert pieces_of(SENTENCES, [1, paris, is_, 2, rome]) == ["", "Paris", " is", "", " Rome", ""]


def test_special_tokens_are_hidden_unless_asked_for():
    ids = [ord("a"), 256, ord("b")]
    assert "".join(pieces_of(BYTES, ids)) == "ab"
    assert "".join(pieces_of(BYTES, ids, skip_special_tokens=False)) == "a<|end|>b"


@pytest.mark.parametrize("token_id", [257, 100_000, 2**31 - 1, -1])
def test_ids_beyond_the_vocabulary_are_empty_text(token_id):
    assert pieces_of(BYTES, [ord("a"), token_id, ord("b")]) == ["a", "", "b", ""]


def first_completed(text: str, stops: tuple[str, ...]) -> str | None:
    """The slow twin: try each prefix; the first in which a stop ends, cut before the longest such stop."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)]
    return None


@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_stops_equal_the_slow_twin_and_nothing_more_is_held_than_needed(text, stops, data):
    stops = tuple(stops)
    extra = [b"aa", b"ab", b"ba", b"bb", b"aba"]
    tokenizer = fakes.ours(fakes.byte_level(extra))
    ids, rest = [], text.encode()
    while rest:
        token = data.draw(st.sampled_from([token for token in (b"a", b"b", *extra) if rest.startswith(token)]))
        ids.append(token[0] if len(token) == 1 else 256 + extra.index(token))
        rest = rest[len(token) :]
    stream, shown, seen = TextStream(tokenizer, stop=stops), "", b""
    for token_id in ids:
        shown += stream.push(token_id)
        seen += bytes([token_id]) if token_id < 256 else extra[token_id - 256]
        if not stream.stopped:
            may_start = [n for n in range(1, len(seen) + 1) if any(stop.startswith(seen[-n:].decode()) for stop in stops)]
            assert shown == seen[: len(seen) - max(may_start, default=0)].decode()
    shown += stream.finish()
    expected = first_completed(text, stops)
    assert stream.stopped == (expected is not None)
    assert shown == (text if expected is None else expected)


def test_nothing_of_a_stop_string_is_shown():
    stop = ("DEFGHIJ",)
    stream = TextStream(BYTES, stop=stop)
    pieces = [stream.push(byte) for byte in b"ABCDEFGHIJKL"]
    assert pieces == ["A", "B", "C", *[""] * 9]
    assert stream.stopped
    assert stream.finish() == ""


def test_the_rest_of_the_token_that_completes_a_stop_is_dropped():
    stream = TextStream(fakes.ours(fakes.byte_level([b"..."])), stop=("..",))
    assert [stream.push(ord("a")), stream.push(256), stream.stopped] == ["a", "", True]


def test_a_start_of_a_stop_is_released_at_the_end():
    stream = TextStream(BYTES, stop=("beta gamma",))
    assert "".join(stream.push(byte) for byte in b"alpha beta ga") == "alpha "
    assert stream.finish() == "beta ga"
    assert not stream.stopped


def test_a_stop_can_end_in_the_tail():
    stream = TextStream(BYTES, stop=("x\ufffd",))
    assert stream.push(ord("x")) + stream.push(0xE4) == ""
    assert (stream.finish(), stream.stopped) == ("", True)


def test_a_stop_of_many_bytes_characters_is_found_across_tokens():
    stream = TextStream(BYTES, stop=("世界",))
    assert "".join(stream.push(byte) for byte in "你好，世界！".encode()) == "你好，"
    assert stream.stopped


def test_a_long_stop_costs_linear_time():
    stream = TextStream(BYTES, stop=("a" * 20_000 + "b",))
    start = time.perf_counter()
    shown = "".join(stream.push(ord("a")) for _ in range(40_000))
    assert time.perf_counter() - start < 5
    assert len(shown) == 20_000


def test_an_empty_stop_is_refused():
    with pytest.raises(RequestError, match="empty string"):
        TextStream(BYTES, stop=("a", ""))


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder(), decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)])],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(decoder):
    backend = fakes.words()
    backend.decoder = decoder
    with pytest.raises(ModelFormatError, match=r"my.json: the decoder has the step .* supported are ByteLevel"):
        fakes.ours(backend, where="my.json")


def test_the_text_modules_load_neither_torch_nor_transformers():
    code = (
        "import sys, minisgl.tokenizer as t; t.TextStream, t.load_tokenizer; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
