"""The tokenizer process's loop, driven through its real sockets, with a byte-level tokenizer: id n below 256 is byte n."""

from __future__ import annotations

import contextlib
import secrets
import threading

import pytest

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
    TokenizeMsg,
    UserMsg,
    UserReply,
)
from minisgl.tokenizer import encoding
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.encoding import serve_encoder
from minisgl.tokenizer.worker import TokenizerWorker, WorkerAddresses
from minisgl.utils import ZmqPullQueue, ZmqPushQueue, ipc_address
from tests.tokenizer.fakes import byte_level, ours

WAIT = 10.0
CONTEXT, POOL = 40, 32
END_ID = 256
TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}>"}, "test")


class GatedTokenizer:
    """A tokenizer that, for texts starting with "slow", waits until `gate` is set; and fails on "crash"."""

    def __init__(self) -> None:
        self._inner = ours(byte_level(), chat_template=TEMPLATE)
        self.gate = threading.Event()
        self.entered = threading.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def encode(self, text, add_special_tokens=True):
        if text.startswith("slow"):
            self.entered.set()
            assert self.gate.wait(WAIT)
        if text == "crash":
            raise ZeroDivisionError("a tokenizer's bug")
        return self._inner.encode(text, add_special_tokens)


class Ends:
    """The API's and the scheduler's ends of a running worker."""

    def __init__(self, inbox, backend, frontend, tokenizer, ready) -> None:
        self.inbox, self.backend, self.frontend, self.tokenizer, self.ready = inbox, backend, frontend, tokenizer, ready

    def ask(self, uid, plain="hi", params=None, **prompt) -> None:
        prompt = prompt or {"text": plain}
        self.inbox.put(TokenizeMsg(uid, params or SamplingParams(), **prompt))

    def accept(self, uid, text="hi", params=None) -> None:
        self.ask(uid, text, params)
        reply = self.frontend.get(WAIT)
        assert (reply.uid, reply.kind) == (uid, "accepted")
        assert self.backend.get(WAIT).uid == uid

    def tell(self, uid, token, reason=None, **more) -> None:
        self.inbox.put(DetokenizeMsg(uid, token, reason is not None, reason, **more))

    def reply(self) -> UserReply:
        return self.frontend.get(WAIT)

    def nothing_else_was_sent(self) -> bool:
        """A last request goes through, and its messages are the next ones."""
        self.accept(999)
        return True


@contextlib.contextmanager
def encoders(num_encoders, suffix, tokenizer):
    """Other processes' loops, as threads; yields their addresses."""
    stop = threading.Event()
    addrs = [ipc_address(suffix, f"encoder-{number}") for number in range(num_encoders)]
    inbox = ipc_address(suffix, "detokenizer")
    threads = [threading.Thread(target=serve_encoder, args=(tokenizer, addr, inbox, stop, lambda _: None)) for addr in addrs]
    for thread in threads:
        thread.start()
    yield addrs
    stop.set()
    for addr, thread in zip(addrs, threads, strict=True):
        with ZmqPushQueue(addr, create=False, encoder=BaseTokenizerMsg.encoder) as queue:
            queue.put(BatchTokenizerMsg([]))
            thread.join(WAIT)
        assert not thread.is_alive()


@contextlib.contextmanager
def running_worker(num_encoders):
    suffix = f"test-{secrets.token_hex(4)}"
    tokenizer, ready, stop = GatedTokenizer(), threading.Event(), threading.Event()
    with contextlib.ExitStack() as stack:
        addrs = stack.enter_context(encoders(num_encoders, suffix, tokenizer))
        addresses = WorkerAddresses(*(ipc_address(suffix, name) for name in ("detokenizer", "backend", "frontend")), tuple(addrs))
        worker = TokenizerWorker(tokenizer, addresses, on_ready=lambda _: ready.set())
        backend = stack.enter_context(ZmqPullQueue(addresses.backend, create=True, decoder=BaseBackendMsg.decoder))
        frontend = stack.enter_context(ZmqPullQueue(addresses.frontend, create=True, decoder=BaseFrontendMsg.decoder))
        inbox = stack.enter_context(ZmqPushQueue(addresses.inbox, create=False, encoder=BaseTokenizerMsg.encoder))
        thread = threading.Thread(target=worker.run, args=(stop,))
        thread.start()
        yield Ends(inbox, backend, frontend, tokenizer, ready)
        tokenizer.gate.set()
        stop.set()
        inbox.put(BatchTokenizerMsg([]))
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.fixture(params=[0, 1], ids=["thread", "process"])
def unready(request):
    """One that tokenizes one prompt after the other, itself or elsewhere."""
    with running_worker(request.param) as ends:
        yield ends


def get_ready(ends):
    ends.inbox.put(BackendReadyMsg(max_seq_len=CONTEXT, num_pool_tokens=POOL))
    assert ends.ready.wait(WAIT)
    return ends


@pytest.fixture
def ends(unready):
    return get_ready(unready)


@pytest.fixture
def two():
    """One for which two others tokenize."""
    with running_worker(2) as ends:
        yield get_ready(ends)


def test_a_request_before_the_scheduler_is_ready_is_refused_with_503(unready):
    unready.ask(1)
    reply = unready.reply()
    assert (reply.uid, reply.kind, reply.status, reply.code) == (1, "rejected", 503, "starting")


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ({"text": "Hé"}, list("Hé".encode())),
        ({"input_ids": [5, 6]}, [5, 6]),
        ({"messages": [{"role": "user", "content": "Hi"}]}, list(b"Hi>")),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, list(b"ab>")),
    ],
)
def test_a_prompt_of_each_kind_is_accepted_and_sent_on(ends, prompt, ids):
    params = SamplingParams(max_tokens=7, stop=("x",))
    ends.ask(3, params=params, **prompt)
    reply, message = ends.reply(), ends.backend.get(WAIT)
    assert (reply.uid, reply.kind, reply.num_prompt_tokens) == (3, "accepted", len(ids))
    assert isinstance(message, UserMsg)
    assert (message.uid, message.input_ids.tolist(), message.sampling_params) == (3, ids, params)


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ({"text": ""}, "empty_prompt", ["empty"]),
        ({"input_ids": []}, "empty_prompt", ["empty"]),
        ({"input_ids": [1, 257]}, "invalid_token_id", ["257", "256"]),
        ({"input_ids": [-1]}, "invalid_token_id", ["-1"]),
        ({"input_ids": [2**40]}, "invalid_token_id", [str(2**40)]),
        ({"input_ids": [1] * CONTEXT}, "context_length_exceeded", [str(CONTEXT), str(CONTEXT - 1)]),
        ({"input_ids": [1] * POOL}, "kv_pool_exceeded", [str(POOL), str(POOL - 1), "--num-pages"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_request", ["image_url", "text"]),
        ({"text": "a", "input_ids": [1]}, "invalid_request", ["text", "input_ids"]),
    ],
)
def test_a_prompt_that_cannot_be_served_is_rejected_and_goes_no_further(ends, prompt, code, words):
    ends.ask(1, **prompt)
    reply = ends.reply()
    assert (reply.kind, reply.status, reply.code) == ("rejected", 400, code)
    assert [word for word in words if word not in reply.message] == []
    assert ends.nothing_else_was_sent()


def test_the_longest_prompt_that_leaves_room_for_one_token_is_accepted(ends):
    ends.ask(1, input_ids=[1] * (POOL - 1))
    assert ends.reply().kind == "accepted"


def test_a_bug_in_the_tokenizer_ends_that_request_only(ends):
    ends.ask(1, "crash")
    reply = ends.reply()
    assert (reply.kind, reply.status) == ("rejected", 500)
    assert "ZeroDivision" not in reply.message
    assert ends.nothing_else_was_sent()


def test_a_frame_that_is_no_message_is_dropped(ends):
    for frame in (b"", b"\x80\x04\x95garbage", b"\x00" * 1000):
        ends.inbox.put_raw(frame)
    assert ends.nothing_else_was_sent()


def test_tokens_become_deltas_and_one_final(ends):
    ends.accept(1)
    for token in b"ab":
        ends.tell(1, token)
    ends.tell(1, ord("c"), "length", num_cached_tokens=2)
    first, second, last = ends.reply(), ends.reply(), ends.reply()
    assert [(r.kind, r.text, r.num_completion_tokens) for r in (first, second, last)] == [
        ("delta", "a", 1),
        ("delta", "b", 2),
        ("final", "c", 3),
    ]
    assert (last.finish_reason, last.num_prompt_tokens, last.num_cached_tokens, last.status) == ("length", 2, 2, 0)
    ends.tell(1, ord("d"))
    ends.tell(1, None, "abort")
    assert ends.nothing_else_was_sent()


def test_an_end_id_counts_and_is_not_shown(ends):
    ends.accept(1, params=SamplingParams(stop_token_ids=(ord("z"),)))
    ends.tell(1, ord("z"), "stop")
    reply = ends.reply()
    assert (reply.kind, reply.text, reply.finish_reason, reply.num_completion_tokens) == ("final", "", "stop", 1)


def test_half_a_character_waits_and_its_tail_comes_with_the_ending(ends):
    ends.accept(1)
    for token in "é".encode()[:1]:
        ends.tell(1, token)
    ends.tell(1, None, "length")
    reply = ends.reply()
    assert (reply.kind, reply.text, reply.num_completion_tokens) == ("final", "�", 1)


def test_a_stop_string_over_two_tokens_ends_the_request_here(ends):
    ends.accept(1, params=SamplingParams(stop=("END",)))
    for token in b"aENDb":
        ends.tell(1, token)
    delta, final = ends.reply(), ends.reply()
    assert (delta.kind, delta.text) == ("delta", "a")
    assert (final.kind, final.text, final.finish_reason, final.num_completion_tokens) == ("final", "", "stop", 4)
    assert ends.backend.get(WAIT) == AbortBackendMsg(1)
    assert ends.nothing_else_was_sent()


def test_a_stop_string_completed_by_the_last_token_is_a_stop_and_aborts_nothing(ends):
    ends.accept(1, params=SamplingParams(stop=("b",)))
    ends.tell(1, ord("a"))
    ends.tell(1, ord("b"), "length")
    assert ends.reply().text == "a"
    final = ends.reply()
    assert (final.text, final.finish_reason) == ("", "stop")
    assert ends.nothing_else_was_sent()


def test_a_stop_string_that_the_rest_of_the_text_completes_is_a_stop(ends):
    ends.accept(1, params=SamplingParams(stop=("\ufffd",)))
    ends.tell(1, ord("a"))
    ends.tell(1, "é".encode()[0], "length")
    assert ends.reply().text == "a"
    final = ends.reply()
    assert (final.text, final.finish_reason) == ("", "stop")


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
def test_a_request_that_broke_off_ends_with_a_status(ends, reason, status):
    ends.accept(1)
    ends.tell(1, None, reason, error="the cause")
    reply = ends.reply()
    assert (reply.kind, reply.finish_reason, reply.status, reply.message) == ("final", reason, status, "the cause")


def test_what_one_frame_brings_leaves_as_one_frame(ends):
    ends.accept(1)
    ends.accept(2)
    ends.inbox.put(BatchTokenizerMsg([DetokenizeMsg(1, ord("a")), DetokenizeMsg(7, ord("x")), DetokenizeMsg(2, ord("b"))]))
    reply = ends.reply()
    assert isinstance(reply, BatchFrontendMsg)
    assert [(each.uid, each.text) for each in reply.data] == [(1, "a"), (2, "b")]


def test_an_abort_reaches_the_scheduler_once_and_later_tokens_are_dropped(ends):
    ends.accept(1)
    ends.inbox.put(AbortMsg(1))
    ends.inbox.put(AbortMsg(1))
    ends.tell(1, ord("a"))
    assert ends.backend.get(WAIT) == AbortBackendMsg(1)
    assert ends.nothing_else_was_sent()


def test_an_abort_while_the_prompt_is_tokenized_is_remembered(ends):
    ends.accept(4)
    ends.ask(1, "slow")
    assert ends.tokenizer.entered.wait(WAIT)
    ends.ask(2, "waits behind it")
    ends.inbox.put(AbortMsg(1))
    ends.inbox.put(AbortMsg(2))
    ends.ask(3, "wanted")
    ends.tell(4, ord("a"))
    assert ends.reply().uid == 4  # so the aborts, sent before it, have been read
    ends.tokenizer.gate.set()
    assert ends.reply().uid == 3
    assert ends.backend.get(WAIT).uid == 3
    assert ends.nothing_else_was_sent()


def test_a_huge_prompt_stalls_nobody_elses_tokens(ends):
    ends.accept(1)
    ends.ask(2, "slow")
    assert ends.tokenizer.entered.wait(WAIT)
    ends.tell(1, ord("a"))
    reply = ends.reply()
    assert (reply.uid, reply.text) == (1, "a")
    ends.tokenizer.gate.set()
    assert ends.reply().uid == 2


def test_a_large_prompt_stalls_no_small_one_where_no_process_tokenizes(monkeypatch):
    monkeypatch.setattr(encoding, "SMALL_PROMPT_BYTES", 20)
    with running_worker(0) as worker:
        ends = get_ready(worker)
        ends.ask(1, "slow" + " " * 30)
        assert ends.tokenizer.entered.wait(WAIT)
        for uid in range(2, 5):
            ends.accept(uid)
        ends.tokenizer.gate.set()
        assert ends.reply().uid == 1


def test_a_prompt_too_long_for_any_context_waits_for_no_other(ends):
    ends.ask(1, "slow")
    assert ends.tokenizer.entered.wait(WAIT)
    ends.ask(2, "x" * 10**6)
    reply = ends.reply()
    assert (reply.uid, reply.kind, reply.status, reply.param) == (2, "rejected", 413, "prompt")
    ends.tokenizer.gate.set()
    assert ends.reply().uid == 1


# ---- several that tokenize ----------------------------------------------------------------------------------------------------


def test_a_huge_prompt_stalls_no_other_prompt_where_two_tokenize(two):
    two.ask(1, "slow")
    assert two.tokenizer.entered.wait(WAIT)
    for uid in range(2, 8):
        two.accept(uid, "goes to the other one")
    two.tokenizer.gate.set()
    assert two.reply().uid == 1
    assert two.backend.get(WAIT).uid == 1


def test_an_abort_of_what_another_process_tokenizes_is_remembered(two):
    two.ask(1, "slow", SamplingParams(n=2, seed=0))
    assert two.tokenizer.entered.wait(WAIT)
    for uid in (1, 2, 1):
        two.inbox.put(AbortMsg(uid))
    two.accept(5, "so the aborts have been read")
    two.tokenizer.gate.set()
    for uid in range(6, 12):  # both have come back and are given work again
        two.accept(uid)
    assert two.nothing_else_was_sent()


def test_an_abort_of_what_waits_for_another_process_is_remembered_and_whoever_asked_hears_of_it(two):
    two.ask(1, "slow")
    assert two.tokenizer.entered.wait(WAIT)
    two.ask(3, "slow too, and long")
    two.ask(5, "waits behind the shorter of both")
    two.inbox.put(AbortMsg(5, wants_ending=True))
    reply = two.reply()
    assert (reply.uid, reply.kind, reply.status, reply.code) == (5, "rejected", 409, "aborted")
    two.tokenizer.gate.set()
    assert {two.reply().uid, two.reply().uid} == {1, 3}
    assert {two.backend.get(WAIT).uid, two.backend.get(WAIT).uid} == {1, 3}
    assert two.nothing_else_was_sent()


def test_each_prompt_is_known_before_its_first_token_and_ends_once_in_a_crowd(two):
    uids = range(1, 201)
    for uid in uids:
        two.ask(uid, "crash" if uid % 7 == 0 else f"prompt {uid}")
        if uid % 3 == 0:
            two.inbox.put(AbortMsg(uid))
    wanted = {uid for uid in uids if uid % 3}
    accepted, rejected = set(), set()
    while not wanted <= accepted | rejected:  # an aborted one may be accepted first
        message = two.frontend.get(WAIT)
        for reply in message.data if isinstance(message, BatchFrontendMsg) else [message]:
            (accepted if reply.kind == "accepted" else rejected).add(reply.uid)
    assert rejected & wanted == {uid for uid in wanted if uid % 7 == 0}
    open_uids, finals = set(), []
    while not wanted - rejected <= open_uids:
        message = two.backend.get(WAIT)
        for each in message.data if isinstance(message, BatchBackendMsg) else [message]:
            (open_uids.add if isinstance(each, UserMsg) else open_uids.discard)(each.uid)
    for uid in sorted(open_uids):
        two.tell(uid, ord("x"), "length")
    while len(finals) < len(wanted - rejected):
        message = two.frontend.get(WAIT)
        finals += [r.uid for r in (message.data if isinstance(message, BatchFrontendMsg) else [message]) if r.kind == "final"]
    assert sorted(finals) == sorted(wanted - rejected)
    assert two.nothing_else_was_sent()
