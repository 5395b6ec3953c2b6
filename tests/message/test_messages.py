"""The wire format: what goes in comes out, and whatever else arrives is an error and never another message."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.message import (
    AbortBackendMsg,
    AbortMsg,
    BackendReadyMsg,
    BaseBackendMsg,
    BaseFrontendMsg,
    BaseTokenizerMsg,
    BatchBackendMsg,
    BatchFrontendMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    ExitMsg,
    Histogram,
    SchedulerStats,
    StatsMsg,
    StatsReply,
    TokenizeMsg,
    UserMsg,
    UserReply,
)

BASES = [BaseBackendMsg, BaseTokenizerMsg, BaseFrontendMsg]
PARAMS = SamplingParams(max_tokens=7, stop=("END", "ä世"), stop_token_ids=(3, 4), ignore_eos=True, skip_special_tokens=False)
MAX_UID = 2**63 - 1

CHAT = [
    {"role": "system", "content": None},
    {"role": "user", "content": [{"type": "text", "text": "a\nb"}], "weight": 1.5, "flags": [True]},
]

PLAIN = [
    AbortBackendMsg(uid=0),
    AbortBackendMsg(uid=MAX_UID),
    ExitMsg(),
    BatchBackendMsg(data=[AbortBackendMsg(uid=1), ExitMsg(), AbortBackendMsg(uid=2)]),
    BatchBackendMsg(data=[]),
    TokenizeMsg(uid=1, sampling_params=PARAMS, text="hello 世界 🤗"),
    TokenizeMsg(uid=2, sampling_params=SamplingParams(), input_ids=[0, 1, 2**31 - 1]),
    TokenizeMsg(uid=3, sampling_params=PARAMS, messages=CHAT, chat_template_kwargs={"enable_thinking": False, "n": 1}),
    DetokenizeMsg(uid=4, next_token=17),
    DetokenizeMsg(uid=5, next_token=None, finished=True, finish_reason="error", error="no page left", num_cached_tokens=3),
    BackendReadyMsg(max_seq_len=2048, num_pool_tokens=65536),
    AbortMsg(uid=6),
    BatchTokenizerMsg(data=[DetokenizeMsg(uid=4, next_token=17), BackendReadyMsg(max_seq_len=1, num_pool_tokens=2), AbortMsg(uid=6)]),
    UserReply(uid=7, kind="accepted", num_prompt_tokens=12),
    UserReply(uid=8, kind="final", text="!", num_prompt_tokens=1, num_completion_tokens=2, num_cached_tokens=3, finish_reason="stop"),
    UserReply(uid=9, kind="rejected", status=400, code="context_length_exceeded", message="5 found, 4 allowed"),
    BatchFrontendMsg(data=[UserReply(uid=7, kind="delta", text="a"), UserReply(uid=7, kind="final", finish_reason="length")]),
]

TIMES = Histogram([0.1, 1.0], [3, 0, 2], 7.5)
STATS = SchedulerStats(1, 2, 0.25, 4, 5, 6, TIMES, Histogram.of(), Histogram.of(0.5))
PLAIN += [StatsMsg(STATS), StatsReply(STATS)]


def base_of(message):
    return next(base for base in BASES if isinstance(message, base))


def user_msg(uid=1, ids=(5, 6, 7), params=PARAMS):
    return UserMsg(uid=uid, input_ids=np.array(ids, dtype=np.int32), sampling_params=params)


@pytest.mark.parametrize("message", PLAIN, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_sent(message):
    base = base_of(message)
    decoded = base.decoder(base.encoder(message))
    assert decoded == message
    assert type(decoded) is type(message)


@pytest.mark.parametrize("ids", [[], [0], [1, -1, 2**31 - 1, -(2**31)], list(range(1000))])
@pytest.mark.parametrize("make", [lambda ids: np.array(ids, dtype=np.int32), lambda ids: torch.tensor(ids, dtype=torch.int32)])
def test_token_ids_are_sent_as_numpy_or_torch_and_decoded_as_torch(make, ids):
    frame = BaseBackendMsg.encoder(UserMsg(uid=3, input_ids=make(ids), sampling_params=PARAMS))
    decoded = BaseBackendMsg.decoder(frame)
    assert (type(decoded), decoded.uid, decoded.sampling_params) == (UserMsg, 3, PARAMS)
    assert decoded.input_ids.dtype == torch.int32
    assert torch.equal(decoded.input_ids, torch.tensor(ids, dtype=torch.int32))


def test_numpy_and_torch_give_the_same_bytes():
    as_torch = UserMsg(uid=1, input_ids=torch.tensor([5, 6, 7], dtype=torch.int32), sampling_params=PARAMS)
    assert BaseBackendMsg.encoder(user_msg()) == BaseBackendMsg.encoder(as_torch)


def test_a_view_with_strides_is_sent_by_its_values():
    ids = np.arange(10, dtype=np.int32)[::3]
    decoded = BaseBackendMsg.decoder(BaseBackendMsg.encoder(UserMsg(uid=1, input_ids=ids, sampling_params=PARAMS)))
    assert decoded.input_ids.tolist() == [0, 3, 6, 9]


def test_a_decoded_tensor_owns_its_memory():
    frame = BaseBackendMsg.encoder(user_msg())
    first, second = BaseBackendMsg.decoder(frame), BaseBackendMsg.decoder(frame)
    first.input_ids.fill_(0)
    assert second.input_ids.tolist() == [5, 6, 7]
    assert BaseBackendMsg.decoder(frame).input_ids.tolist() == [5, 6, 7]


def test_user_messages_travel_in_a_batch():
    batch = BatchBackendMsg(data=[user_msg(1, [1]), AbortBackendMsg(uid=1), user_msg(2, [2, 3])])
    decoded = BaseBackendMsg.decoder(BaseBackendMsg.encoder(batch))
    assert [type(message) for message in decoded.data] == [UserMsg, AbortBackendMsg, UserMsg]
    assert [message.uid for message in decoded.data] == [1, 1, 2]
    assert decoded.data[2].input_ids.tolist() == [2, 3]


@pytest.mark.parametrize(
    "ids",
    [np.array([1], dtype=np.int64), np.array([1.0], dtype=np.float32), np.array([[1]], dtype=np.int32), torch.tensor([1]), object()],
    ids=["int64", "float32", "two dimensions", "torch int64", "an object"],
)
def test_other_arrays_are_refused_when_sent(ids):
    with pytest.raises(TypeError):
        BaseBackendMsg.encoder(UserMsg(uid=1, input_ids=ids, sampling_params=PARAMS))


class Launch:
    """What a pickle could do to a process that loads it."""

    def __reduce__(self):
        return print, ("the pickle ran",)


def wire(**fields):
    return msgspec.msgpack.encode(fields)


def user_wire(**changes):
    fields = msgspec.msgpack.decode(BaseBackendMsg.encoder(user_msg()))
    return msgspec.msgpack.encode({**fields, **changes})


GOOD = BaseBackendMsg.encoder(user_msg())
BAD_FRAMES = {
    "empty": b"",
    "one zero": b"\0",
    "no msgpack": b"\xc1\xc1\xc1",
    "a string": msgspec.msgpack.encode("UserMsg"),
    "a list": msgspec.msgpack.encode([1, 2]),
    "an integer": msgspec.msgpack.encode(2**63),
    "cut short": GOOD[:-1],
    "one byte more": GOOD + b"\0",
    "two messages": GOOD + GOOD,
    "a pickle": pickle.dumps(Launch()),
    "no type": wire(uid=1),
    "an unknown type": wire(type="Launch", uid=1),
    "the base's name": wire(type="BaseBackendMsg"),
    "type as a number": wire(type=1, uid=1),
    "a field is missing": wire(type="UserMsg", uid=1),
    "uid is a string": wire(type="AbortBackendMsg", uid="1"),
    "uid is a float": wire(type="AbortBackendMsg", uid=1.5),
    "uid is a bool": wire(type="AbortBackendMsg", uid=True),
    "uid is null": wire(type="AbortBackendMsg", uid=None),
    "ids of another dtype": user_wire(input_ids=["int64", b"\0" * 8]),
    "ids are a plain list": user_wire(input_ids=[1, 2, 3]),
    "ids with half a number": user_wire(input_ids=["int32", b"\0" * 5]),
    "ids as text": user_wire(input_ids=["int32", "abcd"]),
    "ids with a third part": user_wire(input_ids=["int32", b"\0" * 4, 1]),
    "ids are null": user_wire(input_ids=None),
    "sampling is null": user_wire(sampling_params=None),
    "temperature is text": user_wire(sampling_params={"temperature": "hot"}),
    "temperature is not a number": user_wire(sampling_params={"temperature": float("nan")}),
    "max_tokens below one": user_wire(sampling_params={"max_tokens": 0}),
    "an empty stop": user_wire(sampling_params={"stop": [""]}),
    "a batch in a batch": wire(type="BatchBackendMsg", data=[{"type": "BatchBackendMsg", "data": []}]),
    "a batch of null": wire(type="BatchBackendMsg", data=[None]),
    "nested without end": b"\x81\xa4type" + b"\x91" * 100_000,
    "a length that is not there": b"\xdd\xff\xff\xff\xff",
    "a string of broken UTF-8": b"\x81\xa4type\xa2\xff\xff",
    "a tokenizer's message": BaseTokenizerMsg.encoder(AbortMsg(uid=1)),
    "a reply": BaseFrontendMsg.encoder(UserReply(uid=1, kind="accepted")),
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a_bad_frame_is_an_error_and_runs_nothing(frame, capsys):
    with pytest.raises((msgspec.MsgspecError, ValueError, RecursionError)):
        BaseBackendMsg.decoder(frame)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("num_bytes", [1, 2, 31, 1000, 2**20])
def test_random_bytes_are_an_error(base, num_bytes):
    frame = random.Random(num_bytes).randbytes(num_bytes)
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        base.decoder(frame)


@pytest.mark.parametrize("message", PLAIN, ids=lambda message: type(message).__name__)
def test_no_base_decodes_another_bases_messages(message):
    sender = base_of(message)
    for receiver in BASES:
        if receiver is not sender:
            with pytest.raises(msgspec.MsgspecError):
                receiver.decoder(sender.encoder(message))


@pytest.mark.parametrize(
    "disguise", [{"type": "AbortMsg", "uid": 9}, {"type": "ExitMsg"}, {"__type__": "UserMsg"}, {"type": "DetokenizeMsg"}]
)
def test_what_a_user_sends_stays_data(disguise):
    chat = [{"role": "user", "content": disguise, **disguise}]
    sent = TokenizeMsg(uid=1, sampling_params=SamplingParams(), messages=chat, chat_template_kwargs=disguise)
    for message in (sent, BatchTokenizerMsg(data=[sent])):
        decoded = BaseTokenizerMsg.decoder(BaseTokenizerMsg.encoder(message))
        assert decoded == message
        inner = decoded.data[0] if isinstance(decoded, BatchTokenizerMsg) else decoded
        assert type(inner) is TokenizeMsg
        assert type(inner.messages[0]["content"]) is dict
        assert type(inner.chat_template_kwargs) is dict


def test_text_that_looks_like_a_frame_stays_text():
    text = BaseTokenizerMsg.encoder(AbortMsg(uid=1)).decode("latin-1")
    sent = TokenizeMsg(uid=2, sampling_params=SamplingParams(), text=text)
    assert BaseTokenizerMsg.decoder(BaseTokenizerMsg.encoder(sent)) == sent


def test_no_torch_until_a_tensor_is_decoded():
    program = """
import sys
import numpy as np
from minisgl.core import SamplingParams
from minisgl.message import BaseBackendMsg, BaseTokenizerMsg, DetokenizeMsg, UserMsg
frame = BaseBackendMsg.encoder(UserMsg(uid=1, input_ids=np.array([1], dtype=np.int32), sampling_params=SamplingParams()))
BaseTokenizerMsg.decoder(BaseTokenizerMsg.encoder(DetokenizeMsg(uid=1, next_token=2)))
print("torch" in sys.modules)
BaseBackendMsg.decoder(frame)
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["False", "True"]
