"""An OpenAI-compatible server as what answers: streamed chat completions over the standard library's HTTP client.

One connection per request, whose end ends the request. It follows no redirection and uses no proxy, so that the key reaches the named
server only. Knows no terminal. Called by the command line, and then by the program.
"""

from __future__ import annotations

import http.client
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from minisgl.chat.backend import AnswerError, Messages, Piece
from minisgl.errors import ConfigError

__all__ = ["ServerBackend", "connect", "is_url"]

T = TypeVar("T")

CONNECT_S = 10.0
SILENCE_S = 600.0
"""A long prompt may take minutes before the first token; Ctrl-C is there for whoever does not want to wait."""
MAX_LINE_BYTES = 2**20
MAX_BODY_BYTES = 2**20


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """One event of a stream: only what is used of it."""

    choices: list[_Choice] | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def is_url(target: str) -> bool:
    """Whether `target` names a server rather than a model."""
    return target.lower().startswith(("http://", "https://"))


def connect(url: str, model: str | None = None, api_key: str | None = None) -> ServerBackend:
    """The server at `url`. Without a `model` it is asked for its first; one that has no such list gets requests without a model's name.

    Raises ConfigError for a URL or a key that cannot be used, AnswerError if the server cannot be reached or refuses the key.
    """
    server = ServerBackend(url, model, api_key)
    return server if model is not None else ServerBackend(url, server.first_model(), api_key)


class ServerBackend:
    """What `connect` returns. The server's own sampling defaults hold for what is not asked for."""

    defaults: Mapping[str, Any] | None = None

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        """`url`: the server, or the folder of its API, such as http://127.0.0.1:1919/v1. Raises ConfigError."""
        self._is_secure, self._host, self._port, self._base = _read_url(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise ConfigError("--api-key: characters found that no HTTP header can hold; printable ASCII is wanted")
        self.name = f"{model or 'the model'} at {url}"
        self._model = model
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """As Backend says; `params` become fields of the request's body."""
        model = {} if self._model is None else {"model": self._model}
        body = msgspec.json.encode({**model, "messages": messages, "stream": True, **params})
        reason, is_done = None, False
        with self._exchange("POST", "/chat/completions", body) as response:
            _check_status(response)
            for data in _data_lines(response):
                is_done = data == b"[DONE]"
                if is_done:
                    break
                text, ending = _read_chunk(data)
                reason = ending or reason
                if text:
                    yield Piece(text)
        if reason is None and not is_done:
            raise AnswerError("the answer broke off: the server closed the connection")
        yield Piece("", reason or "stop")

    def first_model(self) -> str | None:
        """The name of the first model that the server lists; None if it has none or no list. Raises AnswerError."""
        with self._exchange("GET", "/models", None) as response:
            if response.status in (404, 405):
                return None
            _check_status(response)
            models = _decode(response.read(MAX_BODY_BYTES), _Models).data
        return models[0].id if models else None

    def close(self) -> None:
        """Nothing to do: no connection outlives its request."""

    @contextmanager
    def _exchange(self, method: str, route: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        """Send a request; the connection is closed when this is left. Failures of the network within become AnswerErrors."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_S)
            connection.request(method, self._base + route, body, self._headers)
            with connection.getresponse() as response:
                yield response
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise AnswerError(f"no answer from {self._host}, port {connection.port}: {reason}") from error
        finally:
            connection.close()


def _read_url(url: str) -> tuple[bool, str, int | None, str]:
    """(whether https, host, port, path of the API). Raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}; a URL such as http://127.0.0.1:1919 is wanted") from error
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    if (
        not host
        or parts.username is not None
        or parts.query
        or parts.fragment
        or not (path.isascii() and path.isprintable())
        or " " in path
    ):
        raise ConfigError(f"{url!r} found; http:// or https://, a host and at most a port and a path are wanted")
    return parts.scheme.lower() == "https", host, port, path or "/v1"


def _check_status(response: http.client.HTTPResponse) -> None:
    """Raise AnswerError, with the server's own words if it has some, unless the status is 200."""
    if response.status == 200:
        return
    body = response.read(MAX_BODY_BYTES)
    try:
        found = msgspec.json.decode(body)
        words = _words(found.get("error") or found)
    except (msgspec.MsgspecError, AttributeError, RecursionError, UnicodeDecodeError):
        words = response.reason
    raise AnswerError(f"the server says {response.status}: {words}")


def _words(error: Any) -> str:
    """The message of an error in one of the shapes that servers give it."""
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)


def _data_lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each event, until the connection ends."""
    while line := response.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise AnswerError(f"the server sent a line of more than {MAX_LINE_BYTES} bytes")
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip()


def _read_chunk(data: bytes) -> tuple[str, str | None]:
    """(text, finish reason) of an event. Raises AnswerError if it tells of an error or cannot be read."""
    chunk = _decode(data, _Chunk)
    if chunk.error is not None:
        raise AnswerError(f"the answer broke off: {_words(chunk.error)}")
    if not chunk.choices:
        return "", None
    choice = chunk.choices[0]
    return (choice.delta and choice.delta.content) or "", choice.finish_reason


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise AnswerError(f"the server sent what no OpenAI-compatible server sends: {error}") from error
