"""An offline output's text, made late and in pieces of any size, is the one made token by token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import SamplingParams
from minisgl.llm.output import Output
from minisgl.message import DetokenizeMsg
from minisgl.tokenizer import TextStream
from tests.tokenizer import fakes

TOKENIZERS = [fakes.ours(fakes.byte_level([b"ab", b" \xe4", b"\xb8\x96"])), fakes.ours(fakes.sentence_piece())]
STOPS = ["ab", "世", "\ufffd", " a", "a."]


def slow_twin(tokenizer, ids, params, reason):
    """(text, ids taken, finish reason): one `push` after the other, until a stop string is complete."""
    stream, text = TextStream(tokenizer, skip_special_tokens=params.skip_special_tokens, stop=params.stop), ""
    for place, token_id in enumerate(ids):
        is_shown = reason != "stop" or place < len(ids) - 1
        text += stream.push(token_id) if is_shown else ""
        if stream.stopped:
            return text, ids[: place + 1], "stop"
    return text + stream.finish(), ids, reason


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_the_text_is_the_one_made_token_by_token(data):
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    likely = [*tokenizer.encode("ab世 a.", add_special_tokens=False), 256, 257, 258, tokenizer.vocab_size + 5]
    ids = data.draw(st.lists(st.sampled_from(likely), min_size=1, max_size=14))
    stop = tuple(data.draw(st.lists(st.sampled_from(STOPS), max_size=2)))
    reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
    params = SamplingParams(stop=stop, skip_special_tokens=data.draw(st.booleans()))
    output, shown = Output(3, 5, params, tokenizer), ""
    told = []
    for place, token_id in enumerate(ids):
        is_last = place == len(ids) - 1
        message = DetokenizeMsg(3, token_id, finished=is_last, finish_reason=reason if is_last else None)
        told.append(output.take(message))
        if data.draw(st.booleans()):  # a stream looks now
            assert output.text.startswith(shown)
            shown = output.text
        if output.result is not None:
            break
    text, taken, ended_by = slow_twin(tokenizer, ids, params, reason)
    assert (output.result.text, output.result.token_ids, output.result.finish_reason) == (text, taken, ended_by)
    assert output.text == text
    assert text.startswith(shown)
    assert not any(told[:-1])
    assert told[-1] == (len(taken) < len(ids))  # the scheduler is told of a stop string that it does not know of


def test_an_ending_without_a_token_shows_all_that_came():
    output = Output(3, 5, SamplingParams(), TOKENIZERS[0])
    for token_id in (ord("a"), ord("b"), 0xE4):
        assert not output.take(DetokenizeMsg(3, token_id))
    assert not output.take(DetokenizeMsg(3, None, finished=True, finish_reason="error", error="why"))
    assert (output.result.text, output.result.error) == ("ab\ufffd", "why")
    assert not output.take(DetokenizeMsg(3, ord("c")))
    assert output.text == output.result.text


def test_without_a_tokenizer_there_is_no_text():
    output = Output(3, 5, SamplingParams(stop_token_ids=[9]), None)
    assert not output.take(DetokenizeMsg(3, 8))
    assert not output.take(DetokenizeMsg(3, 9, finished=True, finish_reason="stop"))
    assert (output.text, output.result.text, output.result.token_ids) == ("", "", [8, 9])
