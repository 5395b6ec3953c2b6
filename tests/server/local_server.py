"""API and tokenizer as threads of the test, with the real sockets and HTTP between them; the test itself plays the scheduler.

The model speaks bytes: token n below 256 is byte n, and a chat's prompt is its messages' contents, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from minisgl.message import (
    AbortBackendMsg,
    BackendReadyMsg,
    BaseBackendMsg,
    BaseTokenizerMsg,
    BatchBackendMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    UserMsg,
)
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server.api_process import make_server
from minisgl.server.app import create_app
from minisgl.server.frontend import Frontend
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.worker import TokenizerWorker, WorkerAddresses
from minisgl.utils import ZmqPullQueue, ZmqPushQueue
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

    def hear(self) -> BaseBackendMsg:
        """The next message."""
        if not self._waiting:
            message = self._inbox.get(WAIT)
            self._waiting = list(message.data) if isinstance(message, BatchBackendMsg) else [message]
        return self._waiting.pop(0)

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

    def end(self, uid: int, reason: str = "length", token: int | None = None, error: str | None = None) -> None:
        self.send(DetokenizeMsg(uid, token, True, reason, error=error))

    def send(self, message: BaseTokenizerMsg) -> None:
        self._outbox.put(message)


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
def local_server(*, is_open: bool = True) -> Iterator[LocalServer]:
    """Start all of it; at the end, check that no request is left over in the API."""
    config = SchedulerConfig(_unique_suffix=f"test-{secrets.token_hex(4)}", backend_create_detokenizer_link=False)
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(ZmqPullQueue(config.zmq_backend_addr, create=True, decoder=BaseBackendMsg.decoder))
        outbox = stack.enter_context(ZmqPushQueue(config.zmq_detokenizer_addr, create=False, encoder=BaseTokenizerMsg.encoder))
        scheduler = FakeScheduler(inbox, outbox)
        stack.enter_context(_tokenizer(config, scheduler))
        server = stack.enter_context(_api(config, scheduler))
        if is_open:
            server.call_in_loop(server.frontend.open_doors)
        yield server


@contextlib.contextmanager
def _tokenizer(config: SchedulerConfig, scheduler: FakeScheduler) -> Iterator[None]:
    ready, stop = threading.Event(), threading.Event()
    addresses = WorkerAddresses(config.zmq_detokenizer_addr, config.zmq_backend_addr, config.zmq_frontend_addr)
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
def _api(config: SchedulerConfig, scheduler: FakeScheduler) -> Iterator[LocalServer]:
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def on_started() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()

    def call_in_loop(function, *arguments) -> None:
        done = threading.Event()
        loops[0].call_soon_threadsafe(lambda: (function(*arguments), done.set()))
        assert done.wait(WAIT)

    frontend = Frontend(config.zmq_frontend_addr, config.zmq_detokenizer_addr)
    uvicorn_server = make_server(create_app(frontend, MODEL, on_started))
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
