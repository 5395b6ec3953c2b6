"""One offline request's output while it grows: tokens in, text out, and its ending."""

from __future__ import annotations

from minisgl.core import FinishReason, SamplingParams, TokenLogprobs
from minisgl.llm.results import GenerationResult
from minisgl.message import DetokenizeMsg, PromptLogprobsMsg
from minisgl.tokenizer.detokenize import TextStream
from minisgl.tokenizer.loader import Tokenizer

__all__ = ["Output"]


class Output:
    """Collects the scheduler's messages about one uid. `result` is there once it has ended."""

    def __init__(self, uid: int, num_prompt_tokens: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.uid = uid
        self.token_ids: list[int] = []
        self.result: GenerationResult | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_cached_tokens = 0
        """prompt tokens from the prefix cache; told with the first token, for a stop string is no ending to the scheduler"""
        self._text = ""
        self._unread: list[int] = []
        """tokens that are no text yet"""
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._stream = None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer, skip_special_tokens=params.skip_special_tokens, stop=params.stop)

    @property
    def text(self) -> str:
        """All that can be shown so far. It is made when asked for: many tokens at once take less time than one by one."""
        self._read()
        return self._text

    def _read(self) -> bool:
        """Bring the text up to date. True if a stop string has been completed."""
        if self._stream is None:
            return False
        self._text += self._stream.extend(self._unread)
        self._unread.clear()
        return self._stream.stopped

    def take(self, message: DetokenizeMsg | PromptLogprobsMsg) -> bool:
        """Add a message. True if a stop string was completed by it: the scheduler is then to be told to abort."""
        if self.result is not None:
            return False
        if isinstance(message, PromptLogprobsMsg):
            self.prompt_logprobs += message.logprobs
            return False
        self.num_cached_tokens = max(self.num_cached_tokens, message.num_cached_tokens)
        if message.logprobs is not None:
            self.logprobs.append(message.logprobs)
        if message.next_token is not None:
            self.token_ids.append(message.next_token)
            if message.finish_reason != "stop":
                self._unread.append(message.next_token)
            if self._params.stop and self._read():
                self.end("stop")
                return not message.finished
        if message.finished:
            assert message.finish_reason is not None
            self.end(message.finish_reason, error=message.error)
        return False

    def end(self, reason: FinishReason, *, error: str | None = None) -> None:
        """Nothing more will come."""
        self._text = self.text + (self._stream.finish() if self._stream is not None else "")
        self.result = GenerationResult(
            self._text,
            self.token_ids,
            reason,
            self._num_prompt_tokens,
            self.num_cached_tokens,
            self.logprobs if self._params.logprobs is not None else None,
            self.prompt_logprobs if self._params.prompt_logprobs is not None else None,
            error=error,
        )
