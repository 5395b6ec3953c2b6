"""Tokenizing beside the tokenizer process's loop: in a thread of that process, or in processes of their own, by the same code.

`Encoders` is the loop's end: it hands jobs out and knows which are not back yet. `EncoderLoop` is the other end: it takes one job after
the other. Each job comes back exactly once, an aborted one too. Jobs and aborts for one encoder travel in one queue, in order.

Of several encoders the first is kept for small prompts, so that none waits for a huge one.

Knows messages and the model's tokenizer; not what becomes of a prompt. Called by `worker` and by the server's encoder processes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Union

import msgspec
import numpy as np

from minisgl.errors import RequestError
from minisgl.message import AbortMsg, BackendReadyMsg, BaseTokenizerMsg, BatchTokenizerMsg, DecodeMsg, TokenizedMsg, TokenizeMsg
from minisgl.tokenizer.loader import Tokenizer
from minisgl.tokenizer.prompt import check_sampling_ids, check_token_ids
from minisgl.utils import ZmqPullQueue, ZmqPushQueue

__all__ = ["INTERNAL_ERROR", "EncoderLoop", "Encoders", "Job", "serve_encoder"]

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "an internal error; the server's log tells more"
SMALL_PROMPT_BYTES = 64 * 1024
NUM_THREADS = 2
"""Encoders without processes: one for small prompts, one for large ones."""
Job = Union[TokenizeMsg, DecodeMsg]
Get = Callable[[Union[float, None]], BaseTokenizerMsg]
"""Waits so many seconds, None: for ever, for the next message. Raises TimeoutError."""
Put = Callable[[BaseTokenizerMsg], None]


@dataclass(slots=True)
class _HandedOut:
    """A job that is not back yet."""

    job: Job
    encoder: int
    num_bytes: int
    is_cancelled: bool = False


class Encoders:
    """Who tokenizes, and what. All methods belong to the loop's thread; open inside `with` only."""

    def __init__(self, tokenizer: Tokenizer, results_addr: str, addrs: Sequence[str]) -> None:
        """`addrs`: where encoder processes listen; none: threads are started. Results arrive at `results_addr`."""
        self._tokenizer = tokenizer
        self._results_addr = results_addr
        self._addrs = addrs
        self._puts: list[Put] = []
        self._loads: list[int] = []
        """bytes that each encoder has not given back"""
        self._pending: dict[int, _HandedOut] = {}
        self._max_prompt_bytes = 0
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Encoders:
        if self._addrs:
            queues = [ZmqPushQueue(addr, create=False, encoder=BaseTokenizerMsg.encoder) for addr in self._addrs]
            self._puts = [self._open.enter_context(queue).put for queue in queues]
        else:
            threads = [_encoder_thread(self._tokenizer, self._results_addr) for _ in range(NUM_THREADS)]
            self._puts = [self._open.enter_context(thread) for thread in threads]
        self._loads = [0] * len(self._puts)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the threads once they are done with the prompts at hand."""
        self._open.close()

    def announce(self, limits: BackendReadyMsg) -> None:
        """Tell all what fits; to be called before the first job."""
        self._max_prompt_bytes = limits.max_seq_len * self._tokenizer.longest_token_bytes
        for put in self._puts:
            put(limits)

    def submit(self, job: Job) -> bool:
        """Hand a job to the encoder with the least to do; False if its uid is in use.

        Raises RequestError, before anything else is done with it, for a prompt whose texts are too long for any context.
        """
        if job.uid in self._pending:
            return False
        text_bytes = _num_bytes([job.text, job.messages]) if isinstance(job, TokenizeMsg) else 0
        if text_bytes > self._max_prompt_bytes:
            raise RequestError(
                f"the prompt has {text_bytes} bytes; at most {self._max_prompt_bytes} can fit the context",
                status=413,
                code="request_too_large",
                param="messages" if isinstance(job, TokenizeMsg) and job.messages is not None else "prompt",
            )
        num_bytes = 1 + text_bytes + 4 * len(job.input_ids or [])
        encoder = self._choose(num_bytes)
        self._loads[encoder] += num_bytes
        self._pending[job.uid] = _HandedOut(job, encoder, num_bytes)
        self._puts[encoder](job)
        return True

    def _choose(self, num_bytes: int) -> int:
        """The encoder of a new job: the one with the least to do, but no large job goes to the first of several. Small ones stay in order
        if there are threads only."""
        if num_bytes <= SMALL_PROMPT_BYTES and not self._addrs:
            return 0
        first = 1 if num_bytes > SMALL_PROMPT_BYTES and len(self._loads) > 1 else 0
        return min(range(first, len(self._loads)), key=self._loads.__getitem__)

    def cancel(self, uid: int) -> Job | None:
        """Nobody wants the result any more; the job, or None if there is none."""
        handed_out = self._pending.get(uid)
        if handed_out is None or handed_out.is_cancelled:
            return None
        handed_out.is_cancelled = True
        self._puts[handed_out.encoder](AbortMsg(uid))
        return handed_out.job

    def finish(self, uid: int) -> Job | None:
        """A job has come back; None if it was cancelled or is unknown."""
        handed_out = self._pending.pop(uid, None)
        if handed_out is None:
            return None
        self._loads[handed_out.encoder] -= handed_out.num_bytes
        return None if handed_out.is_cancelled else handed_out.job


class EncoderLoop:
    """Tokenizes one job after the other; jobs and aborts come from `get`, results go to `put`."""

    def __init__(self, tokenizer: Tokenizer, get: Get, put: Put, on_ready: Callable[[BackendReadyMsg], None] = lambda _: None) -> None:
        """`on_ready` is called when the scheduler's limits have arrived, which is before the first job."""
        self._tokenizer, self._get, self._put, self._on_ready = tokenizer, get, put, on_ready
        self._waiting: dict[int, Job] = {}

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set and one more message has come."""
        while not stop.is_set():
            try:
                self._hear(self._get(0 if self._waiting else None))
            except TimeoutError:  # all that has been said has been heard: time for a job
                job = self._waiting.pop(next(iter(self._waiting)))
                self._put(self._encode(job))

    def _hear(self, message: BaseTokenizerMsg) -> None:
        if isinstance(message, BackendReadyMsg):
            self._on_ready(message)
        elif isinstance(message, (TokenizeMsg, DecodeMsg)):
            self._waiting[message.uid] = message
        elif isinstance(message, AbortMsg) and self._waiting.pop(message.uid, None) is not None:
            self._put(TokenizedMsg(message.uid))

    def _encode(self, job: Job) -> TokenizedMsg:
        try:
            if isinstance(job, DecodeMsg):
                check_token_ids(job.input_ids, self._tokenizer.vocab_size, "tokens")
                return TokenizedMsg(job.uid, text=self._tokenizer.decode(job.input_ids, job.skip_special_tokens))
            ids = self._ids(job)
            if job.only_ids:
                return TokenizedMsg(job.uid, text=msgspec.json.encode(ids).decode())
            is_echoed = job.echo and job.text is None
            echoed = self._tokenizer.decode(ids, job.sampling_params.skip_special_tokens) if is_echoed else ""
            return TokenizedMsg(job.uid, np.array(ids, dtype=np.int32).tobytes(), echoed)
        except RequestError as error:
            return TokenizedMsg(job.uid, status=error.status, code=error.code or "", message=str(error), param=error.param)
        except Exception:  # the boundary of one message: whatever a prompt does to the tokenizer, the process lives on
            logger.exception("tokenizing uid %d failed", job.uid)
            return TokenizedMsg(job.uid, status=500, code="internal_error", message=INTERNAL_ERROR)

    def _ids(self, request: TokenizeMsg) -> list[int]:
        """Token ids, at least one, each in the vocabulary."""
        given = [name for name in ("text", "input_ids", "messages") if getattr(request, name) is not None]
        if len(given) != 1:
            raise RequestError(f"exactly one of text, input_ids and messages is wanted; {', '.join(given) or 'none'} found")
        check_sampling_ids(request.sampling_params, self._tokenizer.vocab_size)
        if request.text is not None:
            ids = self._tokenizer.encode(request.text, request.add_special_tokens)
        elif request.messages is not None:
            ids = self._tokenizer.encode_chat(
                request.messages, request.chat_template_kwargs, allow_control_tokens=request.allow_control_tokens
            )
        else:
            ids = request.input_ids or []
        check_token_ids(ids, self._tokenizer.vocab_size)
        return ids


def serve_encoder(
    tokenizer: Tokenizer, inbox_addr: str, results_addr: str, stop: threading.Event, on_ready: Callable[[BackendReadyMsg], None]
) -> None:
    """Be an encoder process: an `EncoderLoop` between two sockets. Raises ConfigError if `inbox_addr` cannot be bound."""
    with (
        ZmqPullQueue[BaseTokenizerMsg](inbox_addr, create=True, decoder=BaseTokenizerMsg.decoder) as inbox,
        ZmqPushQueue[BaseTokenizerMsg](results_addr, create=False, encoder=BaseTokenizerMsg.encoder) as results,
    ):
        EncoderLoop(tokenizer, inbox.get, results.put, on_ready).run(stop)


@contextlib.contextmanager
def _encoder_thread(tokenizer: Tokenizer, results_addr: str) -> Iterator[Put]:
    """An `EncoderLoop` in a thread; what is yielded gives it messages."""
    jobs: SimpleQueue[BaseTokenizerMsg] = SimpleQueue()
    stop = threading.Event()

    def get(timeout: float | None) -> BaseTokenizerMsg:
        try:
            return jobs.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None

    def run() -> None:
        with ZmqPushQueue[BaseTokenizerMsg](results_addr, create=False, encoder=BaseTokenizerMsg.encoder) as results:
            EncoderLoop(tokenizer, get, results.put).run(stop)

    thread = threading.Thread(target=run, name="tokenize", daemon=True)
    thread.start()
    try:
        yield jobs.put
    finally:
        stop.set()
        jobs.put(BatchTokenizerMsg([]))
        thread.join()


def _num_bytes(value: Any) -> int:
    """UTF-8 bytes of all texts in `value`."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, list) else 0
