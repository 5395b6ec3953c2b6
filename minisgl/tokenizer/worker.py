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
from typing import Any, Union

import numpy as np

from minisgl.core import FinishReason, Int32Array, SamplingParams, split_choices
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
    CacheFlushedMsg,
    DecodeMsg,
    DetokenizeMsg,
    FlushBackendMsg,
    FlushCacheMsg,
    PromptLogprobsMsg,
    TokenizeMsg,
    UserMsg,
    UserReply,
)
from minisgl.tokenizer.loader import Tokenizer
from minisgl.tokenizer.output import Output
from minisgl.tokenizer.prompt import check_sampling_ids, check_token_ids
from minisgl.utils import ZmqPullQueue, ZmqPushQueue

__all__ = ["TokenizerWorker", "WorkerAddresses"]

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "an internal error; the server's log tells more"
Job = Union[TokenizeMsg, DecodeMsg]
Outcome = Union[Int32Array, str, RequestError]
"""What becomes of a job: ids, text, or a refusal."""


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """Where a tokenizer process listens (`inbox`, it binds) and whom it tells (it connects)."""

    inbox: str
    backend: str
    frontend: str


class TokenizerWorker:
    """The state of one tokenizer process: what waits to be tokenized, what is being written. `run` is its loop."""

    def __init__(self, tokenizer: Tokenizer, addresses: WorkerAddresses, *, on_ready: Callable[[BackendReadyMsg], None]) -> None:
        """`on_ready` is called in the loop when the scheduler's limits have arrived; until then requests are refused with 503."""
        self._tokenizer = tokenizer
        self._addresses = addresses
        self._on_ready = on_ready
        self._limits: BackendReadyMsg | None = None
        self._encoder = _Encoder(tokenizer, addresses.inbox)
        self._outputs: dict[int, Output] = {}
        """accepted requests that have not ended"""
        self._replies: list[UserReply] = []
        self._orders: list[UserMsg | AbortBackendMsg | FlushBackendMsg] = []

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
            elif isinstance(each, PromptLogprobsMsg):
                if each.uid in self._outputs:
                    self._replies.append(self._outputs[each.uid].push_prompt(each))
            elif isinstance(each, (TokenizeMsg, DecodeMsg)):
                self._start_tokenizing(each)
            elif isinstance(each, AbortMsg):
                self._abort(each)
            elif isinstance(each, FlushCacheMsg):
                self._orders.append(FlushBackendMsg(each.uid))
            elif isinstance(each, CacheFlushedMsg):
                self._replies.append(_flush_reply(each))
            elif isinstance(each, BackendReadyMsg):
                self._limits = each
                self._on_ready(each)

    # ---- prompts --------------------------------------------------------------------------------------------------------------

    def _start_tokenizing(self, request: Job) -> None:
        if self._limits is None:
            self._reject(request, RequestError("the model is still being loaded; try again later", status=503, code="starting"))
        elif request.uid in self._outputs or not self._encoder.submit(request, self._limits.max_seq_len):
            logger.error("uid %d is in use; its second request is dropped", request.uid)

    def _finish_tokenizing(self, request: Job, outcome: Outcome) -> None:
        """Accept or reject a request whose prompt has been tokenized; answer one that asked for no more than that."""
        if isinstance(outcome, RequestError):
            self._reject(request, outcome)
        elif isinstance(outcome, str):
            self._replies.append(UserReply(request.uid, "final", text=outcome, finish_reason="stop"))
        elif isinstance(request, TokenizeMsg) and request.only_ids:
            self._replies.append(UserReply(request.uid, "final", token_ids=outcome.tolist(), finish_reason="stop"))
        elif isinstance(request, TokenizeMsg):
            try:
                self._check_length(len(outcome))
            except RequestError as error:
                self._reject(request, error)
            else:
                self._accept(request, outcome)

    def _accept(self, request: TokenizeMsg, ids: Int32Array) -> None:
        """Send each choice to the scheduler as a request of its own."""
        for uid, params in _choices(request):
            output = Output(self._tokenizer, request, params, ids)
            self._outputs[uid] = output
            self._replies.append(output.accepted(uid))
            self._orders.append(UserMsg(uid, ids, params, request.cache_salt))

    def _reject(self, request: Job, error: RequestError) -> None:
        for uid, _ in _choices(request):
            self._replies.append(UserReply(uid, "rejected", status=error.status, code=error.code, message=str(error), param=error.param))

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

    def _abort(self, message: AbortMsg) -> None:
        """End a request. A uid that is not known has ended already: from the API, an abort never overtakes its request.

        The API aborts all choices of a prompt while it is being tokenized, so the first one's uid stands for all.
        """
        uid = message.uid
        request = self._encoder.cancel(uid)
        if request is not None:
            if message.wants_ending:
                self._reject(request, RequestError("the request was aborted before it began", status=409, code="aborted"))
        elif uid in self._outputs:
            output = self._outputs.pop(uid)
            self._orders.append(AbortBackendMsg(uid))
            if message.wants_ending:
                self._replies.append(output.final(uid, output.finish(), "abort"))

    # ---- answers --------------------------------------------------------------------------------------------------------------

    def _detokenize(self, message: DetokenizeMsg) -> None:
        output = self._outputs.get(message.uid)
        if output is None:
            logger.debug("a token of uid %d, which has ended, is dropped", message.uid)
            return
        reply = output.push(message)
        if output.is_stopped or message.finished:
            self._end(message, output, reply)
        elif reply.text or reply.scores or reply.token_ids:
            self._replies.append(reply)

    def _end(self, message: DetokenizeMsg, output: Output, last: UserReply) -> None:
        """Send the one ending, with what the last token brought, and forget the request; tell the scheduler if it does not know yet."""
        del self._outputs[message.uid]
        if not message.finished:
            self._orders.append(AbortBackendMsg(message.uid))
        reason: FinishReason = "stop" if output.is_stopped else message.finish_reason or "error"
        reply = output.final(message.uid, last.text + output.finish(), reason)
        reply.token_ids, reply.scores = last.token_ids, last.scores
        if reason in ("error", "abort"):
            reply.status, reply.code = (503, "aborted") if reason == "abort" else (500, "internal_error")
            reply.message = message.error or INTERNAL_ERROR
        self._replies.append(reply)


def _choices(request: Job) -> list[tuple[int, SamplingParams]]:
    """The uids of a request's choices, each with its own parameters."""
    params = split_choices(request.sampling_params) if isinstance(request, TokenizeMsg) else [SamplingParams()]
    return [(request.uid + choice, own) for choice, own in enumerate(params)]


def _flush_reply(message: CacheFlushedMsg) -> UserReply:
    if not message.num_running:
        return UserReply(message.uid, "final", finish_reason="stop")
    text = f"{message.num_running} requests run; the cache can be flushed when none does"
    return UserReply(message.uid, "rejected", status=409, code="busy", message=text)


def _check_size(prompt: Any, most: int) -> None:
    """Raise RequestError, before anything else is done with it, for a prompt whose texts have more than `most` bytes."""
    num_bytes = _num_bytes(prompt)
    if num_bytes > most:
        raise RequestError(
            f"the prompt has {num_bytes} bytes; at most {most} can fit the context", status=413, code="request_too_large", param="prompt"
        )


def _num_bytes(value: Any) -> int:
    """UTF-8 bytes of all texts in `value`."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, list) else 0


class _Encoder:
    """Turns prompts into ids in a thread of its own, one after the other. All methods belong to the loop's thread."""

    def __init__(self, tokenizer: Tokenizer, wake_addr: str) -> None:
        self._tokenizer = tokenizer
        self._wake_addr = wake_addr
        self._max_prompt_bytes = 0
        self._pending: dict[int, Job] = {}
        self._todo: SimpleQueue[Job | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Job, Outcome]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tokenize", daemon=True)

    def __enter__(self) -> _Encoder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the thread once it is done with the prompt at hand."""
        self._pending.clear()
        self._todo.put(None)
        self._thread.join()

    def submit(self, request: Job, context: int) -> bool:
        """Queue a request; False if its uid is queued already. A text that cannot fit the `context`, in tokens, will not be read."""
        if request.uid in self._pending:
            return False
        self._max_prompt_bytes = context * self._tokenizer.longest_token_bytes
        self._pending[request.uid] = request
        self._todo.put(request)
        return True

    def cancel(self, uid: int) -> Job | None:
        """Forget a queued request, or the result that is being made, and return it; None if there is none."""
        return self._pending.pop(uid, None)

    def take_done(self) -> list[tuple[Job, Outcome]]:
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

    def _encode(self, request: Job) -> Outcome:
        try:
            if isinstance(request, DecodeMsg):
                check_token_ids(request.input_ids, self._tokenizer.vocab_size)
                return self._tokenizer.decode(request.input_ids, request.skip_special_tokens)
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
        check_sampling_ids(request.sampling_params, self._tokenizer.vocab_size)
        _check_size([request.text, request.messages], self._max_prompt_bytes)
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
