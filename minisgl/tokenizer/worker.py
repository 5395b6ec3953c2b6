"""The tokenizer process's main loop: prompts to token ids for the scheduler, sampled tokens to text for the API.

One loop owns all state and all sockets. Tokenizing runs in a second thread, so that a huge prompt delays nobody's tokens; its results
come back to the loop, which alone decides whether the request still wants them. Every ending of an accepted request is sent from here,
so there is exactly one.

Knows addresses, messages and the model's tokenizer; no HTTP, no scheduler, no model. Called by the server's tokenizer process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from minisgl.core import Int32Array
from minisgl.errors import RequestError
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
from minisgl.tokenizer.detokenize import TextStream
from minisgl.tokenizer.loader import Tokenizer
from minisgl.tokenizer.prompt import check_token_ids
from minisgl.utils import ZmqPullQueue, ZmqPushQueue

__all__ = ["TokenizerWorker", "WorkerAddresses"]

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "an internal error; the server's log tells more"


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """Where a tokenizer process listens (`inbox`, it binds) and whom it tells (it connects)."""

    inbox: str
    backend: str
    frontend: str


@dataclass(slots=True)
class _Output:
    """An accepted request that has not ended. Mutable: it counts."""

    stream: TextStream
    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0


class TokenizerWorker:
    """The state of one tokenizer process: what waits to be tokenized, what is being written. `run` is its loop."""

    def __init__(self, tokenizer: Tokenizer, addresses: WorkerAddresses, *, on_ready: Callable[[BackendReadyMsg], None]) -> None:
        """`on_ready` is called in the loop when the scheduler's limits have arrived; until then requests are refused with 503."""
        self._tokenizer = tokenizer
        self._addresses = addresses
        self._on_ready = on_ready
        self._limits: BackendReadyMsg | None = None
        self._encoder = _Encoder(tokenizer, addresses.inbox)
        self._outputs: dict[int, _Output] = {}
        self._replies: list[UserReply] = []
        self._orders: list[UserMsg | AbortBackendMsg] = []

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set and one more message has come. Raises ConfigError if the inbox cannot be bound."""
        with (
            ZmqPullQueue[BaseTokenizerMsg](self._addresses.inbox, create=True, decoder=BaseTokenizerMsg.decoder) as inbox,
            ZmqPushQueue[BaseBackendMsg](self._addresses.backend, create=False, encoder=BaseBackendMsg.encoder) as backend,
            ZmqPushQueue[BaseFrontendMsg](self._addresses.frontend, create=False, encoder=BaseFrontendMsg.encoder) as frontend,
            self._encoder,
        ):
            while not stop.is_set():
                self._handle(inbox.get())
                for request, outcome in self._encoder.take_done():
                    self._finish_tokenizing(request, outcome)
                self._flush(frontend, backend)

    def _flush(self, frontend: ZmqPushQueue[BaseFrontendMsg], backend: ZmqPushQueue[BaseBackendMsg]) -> None:
        """Send what one frame brought: one frame each way."""
        replies, self._replies = self._replies, []
        orders, self._orders = self._orders, []
        if replies:
            frontend.put(replies[0] if len(replies) == 1 else BatchFrontendMsg(replies))
        if orders:
            backend.put(orders[0] if len(orders) == 1 else BatchBackendMsg(list(orders)))

    def _handle(self, message: BaseTokenizerMsg) -> None:
        for each in message.data if isinstance(message, BatchTokenizerMsg) else (message,):
            if isinstance(each, DetokenizeMsg):
                self._detokenize(each)
            elif isinstance(each, TokenizeMsg):
                self._start_tokenizing(each)
            elif isinstance(each, AbortMsg):
                self._abort(each.uid)
            elif isinstance(each, BackendReadyMsg):
                self._limits = each
                self._on_ready(each)

    # ---- prompts --------------------------------------------------------------------------------------------------------------

    def _start_tokenizing(self, request: TokenizeMsg) -> None:
        if self._limits is None:
            error = RequestError("the model is still being loaded; try again later", status=503, code="starting")
            self._replies.append(_rejection(request.uid, error))
        elif request.uid in self._outputs or not self._encoder.submit(request):
            logger.error("uid %d is in use; its second request is dropped", request.uid)

    def _finish_tokenizing(self, request: TokenizeMsg, outcome: Int32Array | RequestError) -> None:
        """Accept or reject a request whose prompt has been tokenized."""
        if isinstance(outcome, RequestError):
            self._replies.append(_rejection(request.uid, outcome))
            return
        try:
            self._check_length(len(outcome))
        except RequestError as error:
            self._replies.append(_rejection(request.uid, error))
            return
        params = request.sampling_params
        stream = TextStream(self._tokenizer, skip_special_tokens=params.skip_special_tokens, stop=params.stop)
        self._outputs[request.uid] = _Output(stream, len(outcome))
        self._replies.append(UserReply(request.uid, "accepted", num_prompt_tokens=len(outcome)))
        self._orders.append(UserMsg(request.uid, outcome, params))

    def _check_length(self, num_tokens: int) -> None:
        """Raise RequestError if a prompt of `num_tokens` leaves no room for one new token. The scheduler checks the same."""
        assert self._limits is not None
        context, pool = self._limits.max_seq_len, self._limits.num_pool_tokens
        if num_tokens >= context:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; the context holds {context}, the answer included: at most {context - 1} are allowed",
                code="context_length_exceeded",
            )
        if num_tokens >= pool:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; the KV pool holds {pool}, the answer included: at most {pool - 1} are allowed "
                "(the server's --num-pages makes it larger)",
                code="kv_pool_exceeded",
            )

    def _abort(self, uid: int) -> None:
        """The client is gone. A uid that is not known has ended already: from the API, an abort never overtakes its request."""
        if self._encoder.cancel(uid):
            return
        if self._outputs.pop(uid, None) is not None:
            self._orders.append(AbortBackendMsg(uid))

    # ---- answers --------------------------------------------------------------------------------------------------------------

    def _detokenize(self, message: DetokenizeMsg) -> None:
        output = self._outputs.get(message.uid)
        if output is None:
            logger.debug("a token of uid %d, which has ended, is dropped", message.uid)
            return
        text = self._push(output, message)
        stream = output.stream
        if message.finished and not stream.stopped:
            text += stream.finish()
        if stream.stopped or message.finished:
            self._end(message, output, text)
        elif text:
            self._replies.append(UserReply(message.uid, "delta", text=text, num_completion_tokens=output.num_completion_tokens))

    def _push(self, output: _Output, message: DetokenizeMsg) -> str:
        """Count the token; the text that it makes safe to show. An end id counts and shows nothing."""
        output.num_cached_tokens = max(output.num_cached_tokens, message.num_cached_tokens)
        if message.next_token is None:
            return ""
        output.num_completion_tokens += 1
        return "" if message.finish_reason == "stop" else output.stream.push(message.next_token)

    def _end(self, message: DetokenizeMsg, output: _Output, text: str) -> None:
        """Send the one ending and forget the request; tell the scheduler if it does not know yet."""
        del self._outputs[message.uid]
        if not message.finished:
            self._orders.append(AbortBackendMsg(message.uid))
        reply = UserReply(
            message.uid,
            "final",
            text=text,
            num_prompt_tokens=output.num_prompt_tokens,
            num_completion_tokens=output.num_completion_tokens,
            num_cached_tokens=output.num_cached_tokens,
            finish_reason="stop" if output.stream.stopped else message.finish_reason or "error",
        )
        if reply.finish_reason in ("error", "abort"):
            reply.status, reply.code = (503, "aborted") if reply.finish_reason == "abort" else (500, "internal_error")
            reply.message = message.error or INTERNAL_ERROR
        self._replies.append(reply)


def _rejection(uid: int, error: RequestError) -> UserReply:
    return UserReply(uid, "rejected", status=error.status, code=error.code, message=str(error), param=error.param)


class _Encoder:
    """Turns prompts into ids in a thread of its own, one after the other. All methods belong to the loop's thread."""

    def __init__(self, tokenizer: Tokenizer, wake_addr: str) -> None:
        self._tokenizer = tokenizer
        self._wake_addr = wake_addr
        self._pending: dict[int, TokenizeMsg] = {}
        self._todo: SimpleQueue[TokenizeMsg | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[TokenizeMsg, Int32Array | RequestError]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tokenize", daemon=True)

    def __enter__(self) -> _Encoder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the thread once it is done with the prompt at hand."""
        self._pending.clear()
        self._todo.put(None)
        self._thread.join()

    def submit(self, request: TokenizeMsg) -> bool:
        """Queue a request; False if its uid is queued already."""
        if request.uid in self._pending:
            return False
        self._pending[request.uid] = request
        self._todo.put(request)
        return True

    def cancel(self, uid: int) -> bool:
        """Forget a queued request, or the result that is being made; False if there is none."""
        return self._pending.pop(uid, None) is not None

    def take_done(self) -> list[tuple[TokenizeMsg, Int32Array | RequestError]]:
        """What has been tokenized or refused since the last call and was not cancelled."""
        done = []
        while not self._done.empty():
            request, outcome = self._done.get()
            if self._pending.get(request.uid) is request:
                del self._pending[request.uid]
                done.append((request, outcome))
        return done

    def _run(self) -> None:
        """The thread. Its results wait in a queue; a frame without content wakes the loop that sleeps on its socket."""
        wake_up = BatchTokenizerMsg([])
        with ZmqPushQueue[BaseTokenizerMsg](self._wake_addr, create=False, encoder=BaseTokenizerMsg.encoder) as loop:
            while (request := self._todo.get()) is not None:
                if request.uid in self._pending:  # else cancelled
                    self._done.put((request, self._encode(request)))
                    loop.put(wake_up)

    def _encode(self, request: TokenizeMsg) -> Int32Array | RequestError:
        try:
            return np.array(self._ids(request), dtype=np.int32)
        except RequestError as error:
            return error
        except Exception:  # the boundary of one message: whatever a prompt does to the tokenizer, the process lives on
            logger.exception("tokenizing uid %d failed", request.uid)
            return RequestError(INTERNAL_ERROR, status=500, code="internal_error")

    def _ids(self, request: TokenizeMsg) -> list[int]:
        """Token ids, at least one, each in the vocabulary."""
        given = [name for name in ("text", "input_ids", "messages") if getattr(request, name) is not None]
        if len(given) != 1:
            raise RequestError(f"exactly one of text, input_ids and messages is wanted; {', '.join(given) or 'none'} found")
        if request.text is not None:
            ids = self._tokenizer.encode(request.text)
        elif request.messages is not None:
            ids = self._tokenizer.apply_chat_template(request.messages, **request.chat_template_kwargs)
        else:
            ids = request.input_ids or []
        check_token_ids(ids, self._tokenizer.vocab_size)
        return ids
