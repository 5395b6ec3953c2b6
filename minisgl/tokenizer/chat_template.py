"""Chat messages to one prompt text, by the model's own Jinja template in a sandbox.

The environment offers what templates written for transformers expect: trimmed blocks, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, `generation` blocks. Messages are checked and made plain first, so that a template
never meets a null or a list of parts. A marker such as <|im_end|> inside a user's text is rendered as it stands; what becomes of it is
decided when the prompt is tokenized (`Tokenizer.encode_chat` keeps it text).

Knows no token ids. Called by `loader`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.errors import ModelFormatError, RequestError

__all__ = ["ChatTemplate", "plain_messages"]

RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize", "self"})
RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template can raise on messages that it was not written for."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


class ChatTemplate:
    """The templates of one model. `sources`: name -> Jinja source; `default` is used, or `tool_use` when tools are given.

    `where` names their file in errors. Raises ModelFormatError for a source that is no valid template.
    """

    def __init__(self, sources: Mapping[str, str], where: str) -> None:
        self._sources = dict(sources)
        environment = _make_environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ModelFormatError(f"{where}: the chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text. `special_tokens` (bos_token, …) and `variables` are further names for the template.

        The role `developer` is newer than most templates; one that does not name it gets such messages as `system`.

        Raises RequestError: for messages that are malformed or have parts other than text; with the template's own words when it
        raises; for tools or variables that it cannot honour.
        """
        self._check_variables(variables, special_tokens)
        plain = plain_messages(messages)
        name = self._choose(plain, variables)
        if "developer" not in self._sources[name]:
            plain = [{**message, "role": "system"} if message["role"] == "developer" else message for message in plain]
        fixed = {"messages": plain, "add_generation_prompt": add_generation_prompt}
        try:
            return self._templates[name].render({"tools": None, "documents": None, **special_tokens, **variables, **fixed})
        except RENDER_ERRORS as error:
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}", code="chat_template_error", param="messages"
            ) from error

    def _choose(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        tools = variables.get("tools")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                f"the model has chat templates named {sorted(self._templates)}, but no default one", code="chat_template_error"
            )
        source = self._sources[name]
        if tools and "tools" not in source:
            raise RequestError("tools found; this model's chat template has no place for them", code="tools_unsupported", param="tools")
        if "tool_calls" not in source and any(message.get("tool_calls") for message in messages):
            raise RequestError(
                "a message with tool_calls found; this model's chat template has no place for them (tools are unsupported)",
                code="tools_unsupported",
                param="messages",
            )
        return name

    @staticmethod
    def _check_variables(variables: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
        for name in variables:
            if name in RESERVED_VARIABLES or name in special_tokens:
                raise RequestError(f"chat_template_kwargs: {name!r} found; this name is set by the server", param="chat_template_kwargs")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates want them: content is a string (text parts joined, null becomes empty), no null values, tool arguments
    as objects. Raises RequestError naming the message at fault."""
    if not messages:
        raise RequestError("messages: an empty list found; at least one message is wanted", param="messages")
    return [_plain_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: an object with a string `role` is wanted", param="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _plain_content(message.get("content"), where)
    if calls := plain.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise RequestError(f"{where}.tool_calls: a list is wanted", param="messages")
        plain["tool_calls"] = [_plain_tool_call(call, where) for call in calls]
    return plain


def _plain_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}.content: {type(content).__name__} found; a string or a list of text parts is wanted", param="messages")
    return "".join(_part_text(part, f"{where}.content[{place}]") for place, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(f"{where}: a part of type {kind!r} found; only text parts are supported", param="messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text: a string is wanted", param="messages")
    return text


def _plain_tool_call(call: Any, where: str) -> dict[str, Any]:
    """Clients send `arguments` as JSON text; templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.tool_calls: each wants an object `function`", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
