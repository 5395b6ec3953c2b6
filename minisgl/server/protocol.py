"""What clients send, as typed Structs: the fields are the wire format, checked while decoding; ranges are checked by SamplingParams.

Decoding is strict: an unknown field is an error that names it, a bool is no int, NaN and unpaired surrogates are not JSON. Knows no
socket. Called by the routes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from minisgl.core import MAX_LOGPROBS, SamplingParams, check_integer
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg

__all__ = [
    "AbortRequest",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "TokenizeRequest",
    "decode_body",
]

T = TypeVar("T")
Defaults = Mapping[str, Any]
"""Sampling parameters for fields that a request leaves out."""

PATH = re.compile(r"^(.*) - at (?:`key` in )?`\$\.?(.*)`$")
"""msgspec's way of saying where."""
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`")
MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")

MAX_SEQUENCES = 1024
"""Prompts times choices of one request."""
MAX_VALUES = 2**20
"""JSON values of one body, about. A text counts as one; millions of lists would keep everybody waiting for seconds while they are made."""
COMPLETION_TOKENS = 16
"""Most new tokens of a completion that does not say, as in OpenAI's API."""
TEMPLATE_VARIABLES = frozenset(
    {"add_generation_prompt", "date_string", "enable_thinking", "reasoning_effort", "thinking", "thinking_budget"}
)
"""Names that chat_template_kwargs may hold."""


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How tokens are chosen and when the output ends. Null, or left out: the model's generation_config.json, else OpenAI's default."""

    temperature: float | None = None
    """0 to 2; 0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1 is off."""
    min_p: float | None = None
    seed: int | None = None
    """null: a random one, so that the answer differs from time to time."""
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    """At least 1. More than context and pool leave is cut to that. Null: all of it, but 16 for /v1/completions."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    """Log probabilities of the prompt's tokens and of so many likeliest ones at each place, 0 to 20; not for streams."""

    def params(self, defaults: Defaults, **more: Any) -> SamplingParams:
        """Raises RequestError naming the field. `more` goes before the fields, those before `defaults`."""
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        chosen = {**defaults, **given, **{name: value for name, value in more.items() if value is not None}}
        chosen.setdefault("seed", secrets.randbits(64))
        return SamplingParams(**chosen)


SAMPLING_FIELDS = Sampling.__struct_fields__


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Send one more chunk, with the usage and without choices, before the end."""


class OpenAIRequest(Sampling, kw_only=True):
    """What chat completions and completions have in common."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not served -> values, besides null, that ask for nothing and are accepted."""

    model: str | None = None
    """The served model's name; may be left out."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    """Independent answers to each prompt, 1 to 16."""
    cache_salt: str | None = None
    """Cached prefixes are shared only among requests with the same salt."""
    # Bookkeeping of the client's: accepted, without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Raise RequestError naming the first field whose value is not served."""
        for name, neutral in self.NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                text = f"{name}: this value is not supported by this version; leave the field out"
                raise RequestError(text, param=name, code="unsupported")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: found without stream; it is allowed with stream=true only", param="stream_options")
        check_prompt_logprobs(self.prompt_logprobs, self.stream)

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def check_prompt_logprobs(prompt_logprobs: int | None, stream: bool | None) -> None:
    if prompt_logprobs is not None and stream:
        raise RequestError("prompt_logprobs: found with stream=true; it is allowed without a stream only", param="prompt_logprobs")


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat. How far roles and tool calls go is the chat template's business."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    """A text, or parts of type `text`."""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Log probabilities of the sampled tokens."""
    top_logprobs: int | None = None
    """And of so many likeliest ones at each place, 0 to 20; with logprobs=true only."""
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None
    """Variables for the chat template: add_generation_prompt, date_string, enable_thinking, reasoning_effort, thinking, thinking_budget."""
    allow_control_tokens: bool | None = None
    """true: the spelling of a control token in a message becomes that token; otherwise it stays plain text."""
    parallel_tool_calls: bool | None = None
    """Accepted, without effect: tools are not supported."""
    # Not served; see NEUTRAL.
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    service_tier: str | None = None

    def job(self, defaults: Defaults) -> TokenizeMsg:
        """The request as the tokenizer hears it. Raises RequestError naming the field."""
        self.check()
        if not self.messages:
            raise RequestError("messages: an empty list found; at least one message is wanted", param="messages")
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        if len(set(limits)) > 1:
            raise RequestError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        if self.top_logprobs is not None:
            check_integer("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
            if not self.logprobs:
                raise RequestError("top_logprobs: found without logprobs; it is allowed with logprobs=true only", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return TokenizeMsg(
            0,
            self.params(defaults, n=self.n, max_tokens=limits[0] if limits else None, logprobs=logprobs),
            messages=msgspec.to_builtins(self.messages),
            chat_template_kwargs=template_variables(self.chat_template_kwargs),
            allow_control_tokens=bool(self.allow_control_tokens),
            cache_salt=self.cache_salt,
        )


class CompletionRequest(OpenAIRequest, kw_only=True):
    """The body of POST /v1/completions."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",), "best_of": (1,)}

    prompt: str | list[str | int | list[int]]
    """A text, a list of texts, token ids, or a list of lists of token ids. Control tokens spelled in a text become tokens."""
    echo: bool | None = None
    """The text begins with the prompt, and so do the log probabilities."""
    logprobs: int | None = None
    """Log probabilities of each token and of so many likeliest ones, 0 to 20."""
    # Not served; see NEUTRAL.
    suffix: str | None = None
    best_of: int | None = None

    def jobs(self, defaults: Defaults) -> list[TokenizeMsg]:
        """One for each prompt. Raises RequestError naming the field."""
        self.check()
        if self.echo and self.prompt_logprobs is not None:
            text = "prompt_logprobs: found with echo=true, which makes them part of logprobs; leave one of them out"
            raise RequestError(text, param="prompt_logprobs")
        params = self.params(
            {"max_tokens": COMPLETION_TOKENS, **defaults},
            n=self.n,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else self.prompt_logprobs,
        )
        prompts = _prompts(self.prompt)
        if len(prompts) * params.n > MAX_SEQUENCES:
            text = f"prompt: {len(prompts)} prompts times {params.n} choices found; at most {MAX_SEQUENCES} are allowed"
            raise RequestError(text, param="prompt")
        return [TokenizeMsg(0, params, echo=bool(self.echo), cache_salt=self.cache_salt, **_prompt(prompt)) for prompt in prompts]


class GenerateParams(Sampling, kw_only=True):
    """Sampling parameters of POST /generate."""

    logprobs: int | None = None
    """Log probabilities of each token and of so many likeliest ones, 0 to 20."""


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /generate: exactly one of `prompt` and `input_ids`."""

    prompt: str | None = None
    input_ids: list[int] | None = None
    sampling_params: GenerateParams | None = None
    stream: bool | None = None
    model: str | None = None
    cache_salt: str | None = None

    def job(self, defaults: Defaults) -> TokenizeMsg:
        """The request as the tokenizer hears it. Raises RequestError naming the field."""
        own = self.sampling_params or GenerateParams()
        check_prompt_logprobs(own.prompt_logprobs, self.stream)
        if (self.prompt is None) == (self.input_ids is None):
            raise RequestError("exactly one of prompt and input_ids is wanted", param="prompt")
        params = own.params(defaults, logprobs=own.logprobs)
        return TokenizeMsg(0, params, text=self.prompt, input_ids=self.input_ids, cache_salt=self.cache_salt, wants_token_ids=True)


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize: exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: false leaves out those that the tokenizer puts around a text."""
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None
    allow_control_tokens: bool | None = None

    def job(self) -> TokenizeMsg:
        """The request as the tokenizer hears it. Raises RequestError naming the field."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("exactly one of prompt and messages is wanted", param="prompt")
        for name in ("chat_template_kwargs", "allow_control_tokens") if self.messages is None else ("add_special_tokens",):
            if getattr(self, name) is not None:
                raise RequestError(f"{name}: found with a {'prompt' if self.messages is None else 'chat'}; leave it out", param=name)
        return TokenizeMsg(
            0,
            SamplingParams(),
            text=self.prompt,
            messages=None if self.messages is None else msgspec.to_builtins(self.messages),
            add_special_tokens=self.add_special_tokens is not False,
            chat_template_kwargs=template_variables(self.chat_template_kwargs),
            allow_control_tokens=bool(self.allow_control_tokens),
            only_ids=True,
        )


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None
    """true leaves control tokens out of the text."""


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /abort."""

    id: str
    """As in the answer's chunks."""


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """chat_template_kwargs, checked against the list of what is allowed. Raises RequestError."""
    for name in given or {}:
        if name not in TEMPLATE_VARIABLES:
            text = f"chat_template_kwargs: {name!r} found; {', '.join(sorted(TEMPLATE_VARIABLES))} are allowed"
            raise RequestError(text, param="chat_template_kwargs")
    if not isinstance((given or {}).get("add_generation_prompt", True), bool):
        raise RequestError("chat_template_kwargs: add_generation_prompt wants true or false", param="chat_template_kwargs")
    return dict(given or {})


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """All four shapes as a list. Raises RequestError for an empty or a mixed one."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(each) for each in prompt}
    if len(kinds) != 1:
        found = "an empty list" if not kinds else "a list of several kinds"
        raise RequestError(f"prompt: {found} found; a text, token ids, or a list of texts or of lists of ids is wanted", param="prompt")
    return [prompt] if kinds == {int} else prompt  # type: ignore[return-value]  # one kind only, as was checked


def _prompt(prompt: str | list[int]) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}


def decode_body(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`. Raises RequestError: too many values, not JSON, or a field that is unknown, missing or of the wrong type."""
    if _num_marks(body) > MAX_VALUES and _num_marks(_without_texts(body)) > MAX_VALUES:
        text = f"the body has more than {MAX_VALUES} numbers, lists, objects and fields, which is what is allowed; ask for less at a time"
        raise RequestError(text, status=413, code="request_too_large")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _num_marks(json: bytes) -> int:
    return sum(map(json.count, (b",", b":", b"[", b"{")))


def _without_texts(json: bytes) -> bytes:
    """What stands outside of quotes. Each text has a mark before it, so that those which are not cut off are too many anyway."""
    plain = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"', 2 * MAX_VALUES + 2)[::2])


def _field_error(text: str) -> RequestError:
    """msgspec's words, with the field first."""
    match = PATH.match(text)
    what, path = match.groups() if match else (text, "")
    unknown = UNKNOWN_FIELD.match(what)
    if unknown:
        path, what = f"{path}.{unknown[1]}".strip("."), "this field is unknown or not supported"
    missing = MISSING_FIELD.match(what)
    if missing:
        path, what = f"{path}.{missing[1]}".strip("."), "this field is missing"
    param = re.split(r"[.\[]", path)[0] or None
    return RequestError(f"{path}: {what}" if path else f"the body: {what}", param=param)
