"""API and tokenizer as threads of the test, with the real sockets and HTTP between them; the test itself plays the scheduler.

The model speaks bytes: token n below 256 is byte n, and a chat's prompt is its messages' contents, one after the other. All replies to
the API pass a tap that counts: when a server has been used, each request that it accepted has had exactly one ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from minisgl.core import TokenLogprobs
from minisgl.message import (
    AbortBackendMsg,
    BackendReadyMsg,
    BaseBackendMsg,
    BaseFrontendMsg,
    BaseTokenizerMsg,
    BatchBackendMsg,
    BatchFrontendMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    UserMsg,
    UserReply,
)
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server.api_process import make_server
from minisgl.server.app import create_app
from minisgl.server.defaults import SamplingDefaults
from minisgl.server.frontend import Frontend
from minisgl.server.http_options import HttpOptions
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.worker import TokenizerWorker, WorkerAddresses
from minisgl.utils import ZmqPullQueue, ZmqPushQueue, ipc_address
from tests.tokenizer.fakes import byte_level, ours

WAIT = 10.0
MODEL = "byte-model"
CONTEXT, POOL = 100, 80
TEMPLATE = ChatTemplate(
    {
        "default": "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no such talk') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    },
    "test",
)


class FakeScheduler:
    """What the test does in the scheduler's place."""

    def __init__(self, inbox: ZmqPullQueue[BaseBackendMsg], outbox: ZmqPushQueue[BaseTokenizerMsg]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._waiting: list[BaseBackendMsg] = []
        self.aborts: Counter[int] = Counter()
        """aborts that have arrived, heard or not, by uid"""

    def hear(self) -> BaseBackendMsg:
        """The next message."""
        if not self._waiting:
            self.let_arrive(WAIT)
        return self._waiting.pop(0)

    def heard_already(self) -> BaseBackendMsg | None:
        """The next message of those that have been taken from the socket; None if there is none."""
        return self._waiting.pop(0) if self._waiting else None

    def let_arrive(self, timeout: float) -> None:
        """Take one more frame. Raises TimeoutError."""
        message = self._inbox.get(timeout)
        messages = list(message.data) if isinstance(message, BatchBackendMsg) else [message]
        self._waiting += messages
        self.aborts.update(each.uid for each in messages if isinstance(each, AbortBackendMsg))

    def hear_request(self) -> UserMsg:
        message = self.hear()
        assert isinstance(message, UserMsg), message
        return message

    def hear_abort(self) -> int:
        message = self.hear()
        assert isinstance(message, AbortBackendMsg), message
        return message.uid

    def say(self, uid: int, text: str) -> None:
        """A token for each byte, each in a frame of its own."""
        for token in text.encode():
            self.send(DetokenizeMsg(uid, token))

    def say_scored(self, uid: int, text: str, num_top: int = 0) -> None:
        """The same, each token with log probability -token/100 and the `num_top` tokens after it, which are a tenth less likely."""
        for token in text.encode():
            self.send(DetokenizeMsg(uid, token, logprobs=scored(token, num_top)))

    def end(self, uid: int, reason: str = "length", token: int | None = None, error: str | None = None) -> None:
        self.send(DetokenizeMsg(uid, token, True, reason, error=error))

    def send(self, message: BaseTokenizerMsg) -> None:
        self._outbox.put(message)


def scored(token: int, num_top: int = 0) -> TokenLogprobs:
    """Made-up log probabilities: the token's own is -token/100."""
    top = tuple(token + place for place in range(num_top))
    return TokenLogprobs(token, -token / 100, top, tuple(-token / 100 - place / 10 for place in range(num_top)))


class Tap:
    """Hands the tokenizer's replies on to the API and counts them."""

    def __init__(self, inbox: ZmqPullQueue[BaseFrontendMsg], outbox: ZmqPushQueue[BaseFrontendMsg]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self.accepted: Counter[int] = Counter()
        self.finals: Counter[int] = Counter()

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                frame = self._inbox.get_raw(0.05)
                message = self._inbox.decode(frame)
                replies = message.data if isinstance(message, BatchFrontendMsg) else [message]
                for reply in (each for each in replies if isinstance(each, UserReply)):
                    self.accepted[reply.uid] += reply.kind == "accepted"
                    self.finals[reply.uid] += reply.kind == "final" and reply.num_prompt_tokens > 0
                self._outbox.put_raw(frame)

    def check(self, scheduler: FakeScheduler, *, is_broken: bool, timeout: float = WAIT) -> None:
        """Each accepted uid has one final reply, or none and one abort. Where the doors were closed the API has ended the rest itself."""
        deadline = time.monotonic() + timeout
        while (left := self._without_ending(scheduler)) and not is_broken and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                scheduler.let_arrive(0.05)
        assert is_broken or not left, f"accepted and not ended: {left}"
        assert max(self.accepted.values(), default=0) <= 1
        assert all(count <= self.accepted[uid] for uid, count in self.finals.items())
        assert all(scheduler.aborts[uid] == 1 for uid, count in self.accepted.items() if count and not self.finals[uid]) or is_broken

    def _without_ending(self, scheduler: FakeScheduler) -> list[int]:
        return [uid for uid, count in self.accepted.items() if count and not self.finals[uid] and not scheduler.aborts[uid]]


class LocalServer:
    """A running server: `client` asks it, `scheduler` answers, `frontend` is the API's inside."""

    def __init__(self, client: httpx.Client, scheduler: FakeScheduler, frontend: Frontend, call_in_loop) -> None:
        self.client, self.scheduler, self.frontend, self.call_in_loop = client, scheduler, frontend, call_in_loop
        self._threads = ThreadPoolExecutor(4)

    def chat(self, **body) -> httpx.Response:
        """Ask and wait: for requests that are refused."""
        return self.client.post("/v1/chat/completions", json=chat_body(**body))

    def start_chat(self, **body) -> Future[httpx.Response]:
        """Ask in another thread: the scheduler's part is still to be played."""
        return self._threads.submit(self.chat, **body)

    def ask(self, path: str, body: dict | None = None) -> Future[httpx.Response]:
        """POST in another thread."""
        return self._threads.submit(self.client.post, path, json=body)

    @staticmethod
    def events(response: httpx.Response) -> Iterator[dict]:
        """The JSON of each event of a stream that ends as it should."""
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream has no [DONE]")

    def hears_no_abort(self) -> bool:
        """A new request is the very next thing that the scheduler hears."""
        answer = self.start_chat()
        self.scheduler.end(self.scheduler.hear_request().uid)
        return answer.result(WAIT).status_code == 200

    def stream_chat(self, **body):
        """A context manager; entered when the headers have come."""
        return self.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, **body))


def chat_body(content: str = "Hello", **body) -> dict:
    return {"messages": [{"role": "user", "content": content}], **body}


@contextlib.contextmanager
def local_server(
    *, is_open: bool = True, defaults: SamplingDefaults | None = None, options: HttpOptions | None = None
) -> Iterator[LocalServer]:
    """Start all of it; at the end, check that no request is left over and that each had one ending."""
    config = SchedulerConfig(_unique_suffix=f"test-{secrets.token_hex(4)}", backend_create_detokenizer_link=False)
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(ZmqPullQueue(config.zmq_backend_addr, create=True, decoder=BaseBackendMsg.decoder))
        outbox = stack.enter_context(ZmqPushQueue(config.zmq_detokenizer_addr, create=False, encoder=BaseTokenizerMsg.encoder))
        scheduler = FakeScheduler(inbox, outbox)
        tap = stack.enter_context(_tap(config))
        stack.enter_context(_tokenizer(config, scheduler))
        with _api(config, scheduler, defaults, options or HttpOptions()) as server:
            if is_open:
                server.call_in_loop(server.frontend.open_doors)
            yield server
        tap.check(scheduler, is_broken=server.frontend.refusal is not None)


@contextlib.contextmanager
def _tap(config: SchedulerConfig) -> Iterator[Tap]:
    stop = threading.Event()
    with (
        ZmqPullQueue(_tap_addr(config), create=True, decoder=BaseFrontendMsg.decoder) as inbox,
        ZmqPushQueue(config.zmq_frontend_addr, create=False, encoder=BaseFrontendMsg.encoder) as outbox,
    ):
        tap = Tap(inbox, outbox)
        thread = threading.Thread(target=tap.run, args=(stop,))
        thread.start()
        try:
            yield tap
        finally:
            stop.set()
            thread.join(WAIT)
            assert not thread.is_alive()


def _tap_addr(config: SchedulerConfig) -> str:
    return ipc_address(config._unique_suffix, "tap")


@contextlib.contextmanager
def _tokenizer(config: SchedulerConfig, scheduler: FakeScheduler) -> Iterator[None]:
    ready, stop = threading.Event(), threading.Event()
    addresses = WorkerAddresses(config.zmq_detokenizer_addr, config.zmq_backend_addr, _tap_addr(config))
    worker = TokenizerWorker(ours(byte_level(), chat_template=TEMPLATE), addresses, on_ready=lambda _: ready.set())
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        scheduler.send(BackendReadyMsg(max_seq_len=CONTEXT, num_pool_tokens=POOL))
        assert ready.wait(WAIT)
        yield
    finally:
        stop.set()
        scheduler.send(BatchTokenizerMsg([]))
        thread.join(WAIT)
        assert not thread.is_alive()


@contextlib.contextmanager
def _api(
    config: SchedulerConfig, scheduler: FakeScheduler, defaults: SamplingDefaults | None, options: HttpOptions
) -> Iterator[LocalServer]:
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def on_started() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()

    def call_in_loop(function, *arguments) -> None:
        done = threading.Event()
        loops[0].call_soon_threadsafe(lambda: (function(*arguments), done.set()))
        assert done.wait(WAIT)

    frontend = Frontend(config.zmq_frontend_addr, config.zmq_detokenizer_addr, options)
    uvicorn_server = make_server(create_app(frontend, MODEL, on_started, defaults, options=options), options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert started.wait(WAIT)
        host, port = listener.getsockname()
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=WAIT) as client:
            yield LocalServer(client, scheduler, frontend, call_in_loop)
        uvicorn_server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()
    assert frontend.num_open == 0
