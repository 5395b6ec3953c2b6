"""The offline class: a model directory in, text out.

`LLM` tokenizes and queues prompts, turns the loop, and collects outputs. What computes is a backend: one rank in this process, or several
in processes of their own.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from minisgl.core import SamplingParams, split_choices
from minisgl.distributed.info import DistributedInfo
from minisgl.engine.base import EngineLimits
from minisgl.engine.config import check_count
from minisgl.errors import ClosedError, ConfigError, RequestError, WorkerError
from minisgl.llm.output import Output
from minisgl.llm.ranks import RankProcesses
from minisgl.llm.results import GenerationChunk, GenerationResult
from minisgl.message import UserMsg
from minisgl.models.resolve import resolve_model
from minisgl.scheduler.config import SchedulerConfig
from minisgl.tokenizer.loader import Tokenizer, load_tokenizer
from minisgl.tokenizer.prompt import Chat, Prompt, check_sampling_ids, check_token_ids, encode_prompts

if TYPE_CHECKING:
    from minisgl.llm.local import LocalRank
    from minisgl.scheduler.scheduler import Scheduler

__all__ = ["LLM"]

logger = logging.getLogger(__name__)

MIN_PROMPTS_FOR_PROGRESS = 8
MOST_PROMPTS_AT_ONCE = 256
"""are tokenized together, and begin before the others are"""
NOT_OFFLINE = ("model_path", "dtype", "offline_mode", "tp_info", "backend_create_detokenizer_link", "_unique_suffix", "record")
"""Fields of SchedulerConfig that are arguments of their own or mean nothing without other processes."""


class LLM:
    """A model that answers prompts: in this process, or with `tp_size=N` in N processes that share it and go with this object.

    `model_path` is a model directory, a GGUF file or a name on the hub; None is the embedded model. `config` takes the fields of
    `SchedulerConfig` by name (device, page_size, num_pages, max_seq_len, cache_type, use_dummy_weight, ...). Raises ConfigError for an
    unknown name or a value that cannot be honoured, ModelFormatError for a model that cannot be served, WorkerError if a process fails or
    dies, now or later: this object is closed then. Not for several threads at once.
    """

    def __init__(self, model_path: str | Path | None = None, dtype: Any = "auto", *, tp_size: int = 1, **config: Any) -> None:
        _check_names(config)
        check_count("tp_size", tp_size, 1, "tp_size")
        is_here = tp_size == 1
        config |= {"dtype": dtype, "tp_info": DistributedInfo(0, tp_size)}
        # A wrong setting is told before anything is fetched.
        settings = SchedulerConfig(offline_mode=is_here, backend_create_detokenizer_link=is_here, **config)
        model_dir = resolve_model(None if model_path is None else str(model_path))
        self._config = replace(settings, model_path=str(model_dir))
        if is_here:
            from minisgl.llm.local import with_large_steps  # loads torch

            self._config = with_large_steps(self._config)
        self._tokenizer: Tokenizer | None = load_tokenizer(model_dir) if (model_dir / "tokenizer.json").is_file() else None
        self._open: LocalRank | RankProcesses | None = _start(self._config, self._tokenizer)
        self._why_closed = ""
        self._num_requests = 0

    @property
    def config(self) -> SchedulerConfig:
        """The settings as they were given, with the model's directory, and `max_extend_tokens` raised where a large GPU allows it. What
        else the machine decided stands in `limits`."""
        return self._config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if its directory holds none, then prompts are token ids."""
        return self._tokenizer

    @property
    def limits(self) -> EngineLimits:
        """What the engine offers: pages, context, vocabulary. Raises ClosedError after `close`."""
        return self._backend().limits

    @property
    def is_overlapped(self) -> bool:
        """A step is planned while the one before it runs."""
        return self._backend().is_overlapped

    @property
    def num_retractions(self) -> int:
        """How often, so far, a request gave its pages back to others. With several ranks this waits until no request runs."""
        with self._watched() as backend:
            return backend.num_retractions

    @property
    def scheduler(self) -> Scheduler:
        """What runs the requests, to look at. Raises ConfigError with several ranks, ClosedError after `close`."""
        backend = self._backend()
        if isinstance(backend, RankProcesses):
            raise ConfigError(f"scheduler: with tp_size={self._config.tp_info.size} the schedulers are in other processes; set tp_size=1")
        return backend.scheduler

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Raises RequestError while a request runs."""
        with self._watched() as backend:
            if backend.outputs:
                raise RequestError(f"{len(backend.outputs)} requests run; the prefix cache can be emptied when none does", code="busy")
            backend.reset_prefix_cache()

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
        object usable. Raises RequestError if the arguments are no prompts or do not fit each other, ClosedError after `close`.
        """
        many = _as_prompts(prompts)
        show = progress if progress is not None else len(many) >= MIN_PROMPTS_FOR_PROGRESS and sys.stderr.isatty()
        return self._complete(many, _as_params(sampling_params, len(many)), is_shown=show)

    def chat(self, messages: Chat, sampling_params: SamplingParams | None = None, **template_kwargs: Any) -> GenerationResult:
        """Answer one chat: messages with `role` and `content`. `template_kwargs` are further variables for the chat template.

        A chat that cannot be served (malformed, refused by the template, too long) is an error in the result.
        """
        return self._complete([messages], _as_params(sampling_params, 1), variables=template_kwargs)[0]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[GenerationChunk]:
        """Complete one prompt and yield it as it grows; the last chunk carries the result. Closing the iterator ends the request.

        Other calls may run between two chunks; the request then goes on beside them.
        """
        (params,) = _as_params(sampling_params, 1)
        if params.n != 1:
            raise RequestError(f"n: {params.n} found; a stream has one output, use generate for several", param="n")
        self._backend()
        return self._stream(prompt, params)

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[GenerationChunk]:
        ((output,),) = self._submit([(prompt, params)])
        num_shown = num_tokens = 0
        try:
            while True:
                text, tokens, result = output.text[num_shown:], output.token_ids[num_tokens:], output.result
                num_shown, num_tokens = len(output.text), len(output.token_ids)
                if text or tokens or result is not None:
                    yield GenerationChunk(text, tokens, result)
                if result is not None:
                    return
                if output.result is None:  # other calls may have ended it meanwhile
                    self._run_step()
        finally:
            self._drop(range(output.uid, output.uid + 1))

    def close(self) -> None:
        """Give the model's memory back, end the processes. A second call does nothing; using the object afterwards raises ClosedError."""
        backend, self._open = self._open, None
        if backend is not None:
            backend.close()

    def __enter__(self) -> LLM:
        self._backend()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _backend(self) -> LocalRank | RankProcesses:
        if self._open is None:
            raise ClosedError(f"this LLM has been closed{self._why_closed}; make a new one")
        return self._open

    @contextmanager
    def _watched(self) -> Iterator[LocalRank | RankProcesses]:
        """The backend. If one of its processes turns out to be gone, this object is closed."""
        try:
            yield self._backend()
        except WorkerError as error:
            self._why_closed = f", because {error}"
            self.close()
            raise

    def _complete(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        is_shown: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[GenerationResult]:
        """Submit, run until all have ended, collect; whatever has not ended when this is left is dropped."""
        self._backend()
        first_uid = self._num_requests
        try:
            choices: list[list[Output]] = []
            waiting = zip(prompts, params, strict=True)
            while batch := list(islice(waiting, MOST_PROMPTS_AT_ONCE)):
                if choices and self._backend().outputs:
                    self._run_step()  # with one rank, a GPU computes while the next prompts are tokenized
                choices += self._submit(batch, variables)
            self._finish([output for group in choices for output in group], is_shown)
        finally:
            self._drop(range(first_uid, self._num_requests))
        return [_join_choices([output.result for output in group if output.result is not None]) for group in choices]

    def _finish(self, outputs: list[Output], is_shown: bool) -> None:
        """Turn the loop until all have ended."""
        with tqdm(total=len(outputs), unit="request", disable=not is_shown) as bar:
            pending = outputs
            num_open = -1
            while True:
                if num_open != len(self._backend().outputs):  # something has ended
                    num_open = len(self._backend().outputs)
                    pending = [output for output in pending if output.result is None]
                    bar.update(len(outputs) - len(pending) - bar.n)
                if not pending:
                    return
                self._run_step()

    def _run_step(self) -> None:
        with self._watched() as backend:
            backend.run_step()

    def _submit(self, requests: Sequence[tuple[Prompt, SamplingParams]], variables: Mapping[str, Any] | None = None) -> list[list[Output]]:
        """Queue requests; the outputs of each one's choices. With `variables` the prompts are chats."""
        encoded = encode_prompts([prompt for prompt, _ in requests], self._tokenizer, variables)
        return [[self._queue(ids, choice) for choice in split_choices(own)] for (_, own), ids in zip(requests, encoded, strict=True)]

    def _queue(self, ids: list[int] | RequestError, params: SamplingParams) -> Output:
        """Queue one output; one that cannot be served has ended already."""
        backend = self._backend()
        uid, self._num_requests = self._num_requests, self._num_requests + 1
        try:
            if params.stop and self._tokenizer is None:
                raise RequestError(f"stop: {self._config.model_path} holds no tokenizer.json; use stop_token_ids", param="stop")
            check_sampling_ids(params, backend.limits.vocab_size)
            if isinstance(ids, RequestError):
                raise ids
            check_token_ids(ids, backend.limits.vocab_size)
        except RequestError as error:
            output = Output(uid, 0, params, None)
            output.end("error", error=str(error))
            return output
        output = Output(uid, len(ids), params, self._tokenizer)
        backend.submit(UserMsg(uid, np.array(ids, dtype=np.int32), params), output)
        return output

    def _drop(self, uids: range) -> None:
        """Abort those that have not ended, after an interruption."""
        if self._open is None:
            return
        for uid in [uid for uid in self._open.outputs if uid in uids]:
            self._open.abort(uid)
        self._open.settle()


def _start(config: SchedulerConfig, tokenizer: Tokenizer | None) -> LocalRank | RankProcesses:
    """What computes, ready to do so."""
    if config.tp_info.size > 1:
        return RankProcesses.start(config)
    from minisgl.llm.local import LocalRank  # loads torch

    return LocalRank(config, None if tokenizer is None else (tokenizer.eos_token_ids, tokenizer.vocab_size))


def _join_choices(results: list[GenerationResult]) -> GenerationResult:
    """The first of a prompt's results; it carries all of them if there are several."""
    return results[0] if len(results) == 1 else replace(results[0], choices=tuple(results))


def _check_names(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is no setting of an offline engine, with the nearest that is one."""
    known = [field.name for field in fields(SchedulerConfig) if field.name not in NOT_OFFLINE] + ["tp_size"]
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"LLM has no setting {name!r}; {hint}")


def _as_prompts(prompts: Any) -> Sequence[Prompt]:
    """One prompt or several -> several. A list of ints is one prompt; so is a list of messages."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise RequestError(f"prompts: {type(prompts).__name__} found; a prompt or a list of prompts is wanted", param="prompts")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping))):
        return [prompts]
    return prompts


def _as_params(params: Any, count: int) -> Sequence[SamplingParams]:
    """One for all, or one each -> one each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(own, SamplingParams) for own in params):
        raise RequestError("sampling_params: SamplingParams, or a list of them, is wanted", param="sampling_params")
    if len(params) != count:
        raise RequestError(f"sampling_params: {len(params)} for {count} prompts; give one, or one each", param="sampling_params")
    return params
