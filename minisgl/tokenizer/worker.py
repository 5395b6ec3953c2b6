"""The tokenizer process's main loop: prompts to token ids for the scheduler, sampled tokens to text for the API.

One loop owns all state and all sockets. Tokenizing runs in a second thread or in processes of its own (`encoding`), so that a huge prompt
delays nobody's tokens; its results come back to the loop, which alone decides whether the request still wants them: no abort is lost.
Every ending of an accepted request is sent from here, so there is exactly one.

Knows addresses, messages and the model's tokenizer; no HTTP, no scheduler, no model. Called by the server's tokenizer process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

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
    StatsMsg,
    StatsReply,
    TokenizedMsg,
    TokenizeMsg,
    UserMsg,
    UserReply,
)
from minisgl.tokenizer.encoding import INTERNAL_ERROR, Encoders, Job
from minisgl.tokenizer.loader import Tokenizer
from minisgl.tokenizer.output import Output
from minisgl.utils import ZmqPullQueue, ZmqPushQueue

__all__ = ["TokenizerWorker", "WorkerAddresses"]

logger = logging.getLogger(__name__)

BLOCK_CHARS = 1_000_000
"""A text that is longer is handed on in parts."""


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """Where a tokenizer process listens (`inbox`, it binds) and whom it tells (it connects)."""

    inbox: str
    backend: str
    frontend: str
    encoders: tuple[str, ...] = ()
    """of processes that tokenize for it; without them a thread does"""


class TokenizerWorker:
    """The state of one tokenizer process: what waits to be tokenized, what is being written. `run` is its loop."""

    def __init__(self, tokenizer: Tokenizer, addresses: WorkerAddresses, *, on_ready: Callable[[BackendReadyMsg], None]) -> None:
        """`on_ready` is called in the loop when the scheduler's limits have arrived; until then requests are refused with 503."""
        self._tokenizer = tokenizer
        self._addresses = addresses
        self._on_ready = on_ready
        self._limits: BackendReadyMsg | None = None
        self._encoders = Encoders(tokenizer, addresses.inbox, addresses.encoders)
        self._outputs: dict[int, Output] = {}
        """accepted requests that have not ended"""
        self._replies: list[UserReply] = []
        self._orders: list[UserMsg | AbortBackendMsg | FlushBackendMsg] = []
        self._stats: StatsReply | None = None

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set and one more message has come. Raises ConfigError if the inbox cannot be bound."""
        with (
            ZmqPullQueue[BaseTokenizerMsg](self._addresses.inbox, create=True, decoder=BaseTokenizerMsg.decoder) as inbox,
            ZmqPushQueue[BaseBackendMsg](self._addresses.backend, create=False, encoder=BaseBackendMsg.encoder) as backend,
            ZmqPushQueue[BaseFrontendMsg](self._addresses.frontend, create=False, encoder=BaseFrontendMsg.encoder) as frontend,
            self._encoders,
        ):
            while not stop.is_set():
                self._handle(inbox.get())
                self._flush(frontend, backend)

    def _flush(self, frontend: ZmqPushQueue[BaseFrontendMsg], backend: ZmqPushQueue[BaseBackendMsg]) -> None:
        """Send what one frame brought: one frame each way."""
        replies, self._replies = self._replies, []
        orders, self._orders = self._orders, []
        if sum(len(reply.text) for reply in replies) > BLOCK_CHARS:  # one frame each, so that the API can do other things in between
            for reply in replies:
                frontend.put(reply)
        elif replies:
            frontend.put(replies[0] if len(replies) == 1 else BatchFrontendMsg(replies))
        if self._stats is not None:
            frontend.put(self._stats)
            self._stats = None
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
            elif isinstance(each, TokenizedMsg):
                request = self._encoders.finish(each.uid)
                if request is not None:
                    self._finish_tokenizing(request, each)
            elif isinstance(each, AbortMsg):
                self._abort(each)
            elif isinstance(each, FlushCacheMsg):
                self._orders.append(FlushBackendMsg(each.uid))
            elif isinstance(each, CacheFlushedMsg):
                self._replies.append(_flush_reply(each))
            elif isinstance(each, StatsMsg):
                self._stats = StatsReply(each.stats)
            elif isinstance(each, BackendReadyMsg):
                self._limits = each
                self._encoders.announce(each)
                self._on_ready(each)

    # ---- prompts --------------------------------------------------------------------------------------------------------------

    def _start_tokenizing(self, request: Job) -> None:
        if self._limits is None:
            self._reject(request, RequestError("the model is still being loaded; try again later", status=503, code="starting"))
        else:
            try:
                if request.uid in self._outputs or not self._encoders.submit(request):
                    logger.error("uid %d is in use; its second request is dropped", request.uid)
            except RequestError as error:
                self._reject(request, error)

    def _finish_tokenizing(self, request: Job, outcome: TokenizedMsg) -> None:
        """Accept or reject a request whose prompt has been tokenized; answer one that asked for no more than that."""
        if outcome.status:
            self._reject(request, RequestError(outcome.message, status=outcome.status, code=outcome.code, param=outcome.param))
        elif isinstance(request, TokenizeMsg) and not request.only_ids:
            ids = np.frombuffer(outcome.input_ids, dtype=np.int32)
            try:
                self._check_length(len(ids))
            except RequestError as error:
                self._reject(request, error)
            else:
                self._accept(request, ids, request.text or outcome.text)
        else:
            blocks = [outcome.text[start : start + BLOCK_CHARS] for start in range(0, len(outcome.text), BLOCK_CHARS)]
            self._replies += [UserReply(request.uid, "delta", text=block) for block in blocks]
            self._replies.append(UserReply(request.uid, "final", finish_reason="stop"))

    def _accept(self, request: TokenizeMsg, ids: Int32Array, echoed: str) -> None:
        """Send each choice to the scheduler as a request of its own. `echoed`: the prompt's text, if the answers begin with it."""
        for uid, params in _choices(request):
            output = Output(self._tokenizer, request, params, ids, echoed)
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
        request = self._encoders.cancel(uid)
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
        text = last.text + output.finish()  # the rest may complete a stop string
        reason: FinishReason = "stop" if output.is_stopped else message.finish_reason or "error"
        reply = output.final(message.uid, text, reason)
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
