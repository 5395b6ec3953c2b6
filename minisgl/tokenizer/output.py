"""One accepted request's output while it grows, as the tokenizer process keeps it: text, counts, log probabilities.

Knows messages and the tokenizer; no sockets, no other request. Called by `worker`.
"""

from __future__ import annotations

from minisgl.core import FinishReason, Int32Array, SamplingParams, TokenLogprobs
from minisgl.message import DetokenizeMsg, PromptLogprobsMsg, TokenizeMsg, TokenScore, UserReply
from minisgl.tokenizer.detokenize import TextStream
from minisgl.tokenizer.loader import Tokenizer

__all__ = ["Output"]


class Output:
    """Counts, and turns what the scheduler says of one uid into what its client is to see. Mutable."""

    def __init__(self, tokenizer: Tokenizer, request: TokenizeMsg, params: SamplingParams, prompt: Int32Array, echoed: str) -> None:
        """`echoed`: the prompt as a text, if the output is to begin with it."""
        self.num_prompt_tokens = len(prompt)
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self._pieces = tokenizer.pieces
        self._stream = TextStream(tokenizer, skip_special_tokens=params.skip_special_tokens, stop=params.stop, continues=request.echo)
        self._wants_token_ids = request.wants_token_ids
        self._echo = _Echo(tokenizer, request, int(prompt[0]), echoed, params) if request.echo else None
        self._offset = len(self._echo.text) if self._echo else 0

    @property
    def is_stopped(self) -> bool:
        """A stop string was completed."""
        return self._stream.stopped

    def accepted(self, uid: int) -> UserReply:
        """The first reply; it carries the prompt's text and its first token if they are to be echoed."""
        reply = UserReply(uid, "accepted", num_prompt_tokens=self.num_prompt_tokens)
        if self._echo is not None:
            reply.text = self._echo.text
            if self._echo.is_scored:
                first = self._echo.first_token
                reply.scores = [self._score(TokenLogprobs(first, None), self._echo.next_offset(first))]
        return reply

    def push(self, message: DetokenizeMsg) -> UserReply:
        """Count the token, if there is one; what there is to show of it. An end id counts and shows nothing."""
        self.num_cached_tokens = max(self.num_cached_tokens, message.num_cached_tokens)
        token = message.next_token
        self.num_completion_tokens += token is not None
        reply = UserReply(message.uid, "delta", num_completion_tokens=self.num_completion_tokens)
        if token is None:
            return reply
        if self._wants_token_ids:
            reply.token_ids = [token]
        if message.finish_reason != "stop":
            if message.logprobs is not None:
                reply.scores = [self._score(message.logprobs, self._offset + self._stream.num_chars)]
            reply.text = self._stream.push(token)
        return reply

    def push_prompt(self, message: PromptLogprobsMsg) -> UserReply:
        """Log probabilities of prompt tokens, as part of the text if the prompt is echoed."""
        reply = UserReply(message.uid, "delta")
        if self._echo is not None:
            reply.scores = [self._score(entry, self._echo.next_offset(entry.token_id)) for entry in message.logprobs]
        else:
            reply.prompt_scores = [self._score(entry, 0) for entry in message.logprobs]
        return reply

    def finish(self) -> str:
        """The output has ended; the rest of its text."""
        return self._stream.finish()

    def final(self, uid: int, text: str, reason: FinishReason) -> UserReply:
        """The ending, with its last `text`."""
        return UserReply(
            uid,
            "final",
            text=text,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens,
            finish_reason=reason,
        )

    def _score(self, entry: TokenLogprobs, offset: int) -> TokenScore:
        top = [(token_id, self._bytes(token_id), logprob) for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        return TokenScore(entry.token_id, self._bytes(entry.token_id), entry.logprob, offset, top)

    def _bytes(self, token_id: int) -> bytes:
        return self._pieces.piece(token_id, is_first=False) or b""


class _Echo:
    """The prompt as text, and where each of its tokens begins in it."""

    def __init__(self, tokenizer: Tokenizer, request: TokenizeMsg, first_token: int, text: str, params: SamplingParams) -> None:
        self.first_token = first_token
        self.is_scored = params.prompt_logprobs is not None
        self.text = text
        is_verbatim = request.text is not None
        self._added_ids = tokenizer.special_ids if is_verbatim else frozenset()
        self._stream = TextStream(tokenizer, skip_special_tokens=not is_verbatim and params.skip_special_tokens)

    def next_offset(self, token_id: int) -> int:
        """Where the next token begins. A BOS that the tokenizer put before a text is no part of it."""
        offset = min(self._stream.num_chars, len(self.text))
        if offset or token_id not in self._added_ids:
            self._stream.push(token_id)
        return offset
