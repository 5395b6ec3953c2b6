"""The offline class: a model directory in, text out, in this process.

`LLM` is both ends of a scheduler in offline mode: it tokenizes and queues prompts, turns the loop, and collects outputs.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.core import SamplingParams, split_choices
from minisgl.errors import ClosedError, ConfigError, RequestError
from minisgl.llm.output import Output
from minisgl.llm.results import GenerationChunk, GenerationResult
from minisgl.message import AbortBackendMsg, BaseBackendMsg, BaseTokenizerMsg, BatchTokenizerMsg, DetokenizeMsg, PromptLogprobsMsg, UserMsg
from minisgl.models.resolve import resolve_model
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tokenizer.loader import Tokenizer, load_tokenizer
from minisgl.tokenizer.prompt import Chat, Prompt, prompt_ids

__all__ = ["LLM"]

logger = logging.getLogger(__name__)

MIN_PROMPTS_FOR_PROGRESS = 8


class _OfflineScheduler(Scheduler):
    """A scheduler whose messages come from a list and whose results go to the outputs of their uids."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.inbox: deque[BaseBackendMsg] = deque()
        self.outputs: dict[int, Output] = {}
        super().__init__(config)

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        """Everything queued. Nobody turns the loop without a request, so `blocking` finds one."""
        del blocking
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def offline_send_result(self, reply: BaseTokenizerMsg) -> None:
        for message in reply.data if isinstance(reply, BatchTokenizerMsg) else [reply]:
            assert isinstance(message, (DetokenizeMsg, PromptLogprobsMsg))
            output = self.outputs.get(message.uid)
            if output is None:
                continue
            if output.take(message):
                self.inbox.append(AbortBackendMsg(message.uid))
            if output.result is not None:
                del self.outputs[message.uid]


class LLM:
    """An engine in this process.

    `model_path` is a model directory, a GGUF file or a name on the hub; None is the embedded model. `config` takes the fields of
    `SchedulerConfig` by name (page_size, num_pages, max_seq_len, cache_type, ...). Raises ConfigError for an unknown name or a value
    that cannot be honoured, ModelFormatError for a model that cannot be served. Not for several threads at once.
    """

    def __init__(self, model_path: str | None = None, dtype: Any = "auto", **config: Any) -> None:
        _check_names(config)
        model_dir = resolve_model(None if model_path is None else str(model_path))
        self._config = SchedulerConfig(model_path=str(model_dir), dtype=dtype, offline_mode=True, **config)
        self._tokenizer: Tokenizer | None = load_tokenizer(model_dir) if (model_dir / "tokenizer.json").is_file() else None
        self._open: _OfflineScheduler | None = _OfflineScheduler(self._config)
        self._num_requests = 0

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if its directory holds none, then prompts are token ids."""
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Complete prompts, each a text, a list of token ids or a chat; one result per prompt, in order.

        `sampling_params`: one for all, or one each. A prompt that cannot be served is an error in its own result and the others go on.
        `progress`: a bar on stderr; None shows one for long work on a terminal. Interrupted, it drops what it started and leaves the
        object usable.
        """
        many = _as_prompts(prompts)
        params = _as_params(sampling_params, len(many))
        show = progress if progress is not None else len(many) >= MIN_PROMPTS_FOR_PROGRESS and sys.stderr.isatty()
        choices = [self._submit_choices(prompt, own) for prompt, own in zip(many, params, strict=True)]
        outputs = [output for group in choices for output in group]
        scheduler = self._scheduler()
        try:
            with tqdm(total=len(outputs), unit="request", disable=not show) as bar:
                pending = outputs
                while pending := [output for output in pending if output.result is None]:
                    bar.update(len(outputs) - len(pending) - bar.n)
                    scheduler.run_step()
                bar.update(len(outputs) - bar.n)
        finally:
            self._drop(outputs)
        return [_join_choices([output.result for output in group if output.result is not None]) for group in choices]

    def chat(self, messages: Chat, sampling_params: SamplingParams | None = None, **template_kwargs: Any) -> GenerationResult:
        """Answer one chat: messages with `role` and `content`. `template_kwargs` are further variables for the chat template."""
        prompt: Prompt = messages
        if template_kwargs:
            prompt = self._known_tokenizer().apply_chat_template(messages, **template_kwargs)
        return self.generate([prompt], sampling_params)[0]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[GenerationChunk]:
        """Complete one prompt and yield it as it grows; the last chunk carries the result. Closing the iterator ends the request."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n: {params.n} found; a stream has one output, use generate for several", param="n")
        output = self._submit(prompt, params)
        num_shown = num_tokens = 0
        try:
            while True:
                text, tokens, result = output.text[num_shown:], output.token_ids[num_tokens:], output.result
                num_shown, num_tokens = len(output.text), len(output.token_ids)
                if text or tokens or result is not None:
                    yield GenerationChunk(text, tokens, result)
                if result is not None:
                    return
                self._scheduler().run_step()
        finally:
            self._drop([output])

    def close(self) -> None:
        """Give the model's memory back. A second call does nothing; using the object afterwards raises ClosedError."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> LLM:
        self._scheduler()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scheduler(self) -> _OfflineScheduler:
        if self._open is None:
            raise ClosedError("this LLM has been closed; make a new one")
        return self._open

    def _known_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{self._config.model_path} holds no tokenizer.json: give prompts as lists of token ids")
        return self._tokenizer

    def _submit_choices(self, prompt: Prompt, params: SamplingParams) -> list[Output]:
        """One request per choice, each with a seed of its own."""
        return [self._submit(prompt, choice) for choice in split_choices(params)]

    def _submit(self, prompt: Prompt, params: SamplingParams) -> Output:
        """Queue one request; a prompt that cannot be served gives an output that has ended already."""
        scheduler = self._scheduler()
        uid, self._num_requests = self._num_requests, self._num_requests + 1
        try:
            if params.stop:
                self._known_tokenizer()
            ids = prompt_ids(prompt, self._tokenizer, scheduler.engine.limits.vocab_size)
        except RequestError as error:
            output = Output(uid, 0, params, None)
            output.end("error", error=str(error))
            return output
        output = Output(uid, len(ids), params, self._tokenizer)
        scheduler.outputs[uid] = output
        scheduler.inbox.append(UserMsg(uid, np.array(ids, dtype=np.int32), params))
        return output

    def _drop(self, outputs: list[Output]) -> None:
        """Abort those that have not ended, after an interruption, and handle what is in flight once nothing else runs."""
        scheduler = self._open
        if scheduler is None:
            return
        for output in outputs:
            if output.result is None and scheduler.outputs.pop(output.uid, None) is not None:
                scheduler.inbox.append(AbortBackendMsg(output.uid))
        while (scheduler.inbox or not scheduler.is_idle) and not scheduler.outputs:
            scheduler.run_step()


def _join_choices(results: list[GenerationResult]) -> GenerationResult:
    """The first of a prompt's results; it carries all of them if there are several."""
    return results[0] if len(results) == 1 else replace(results[0], choices=tuple(results))


def _check_names(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that `SchedulerConfig` does not have, with the nearest that it has."""
    known = [field.name for field in fields(SchedulerConfig) if field.name not in ("model_path", "dtype", "offline_mode")]
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(n for n in known if not n.startswith('_'))}"
            raise ConfigError(f"LLM has no setting {name!r}; {hint}")


def _as_prompts(prompts: str | Sequence[int] | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several -> several. A list of ints is one prompt; so is a list of messages."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping))):
        return [prompts]  # type: ignore[list-item]  # the first element tells what the list is
    return prompts  # type: ignore[return-value]  # likewise


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"sampling_params: {len(params)} for {count} prompts; give one, or one each", param="sampling_params")
    return params
