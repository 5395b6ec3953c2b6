"""HTTP/1.1 as the load client speaks it: one connection, one request at a time, and an answer whose events are counted as they arrive.

Reading costs a few microseconds per event, so that many streams fit into one process: no JSON is parsed while an answer streams. Knows
no workload. Called by `serve` and `serve_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from minisgl.errors import ConfigError

__all__ = ["AnswerReader", "Client", "Target", "parse_url"]

TOKEN = re.compile(rb'"(?:content|reasoning_content|reasoning|text)":\s*"(?!")')
"""In the line of an event that brings text. (Inside a JSON string the first quotation mark would have a backslash before the second.)"""
STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?")
NUM_LATEST_READS = 8
"""Reads that are kept of an answer; each holds at least one event, and what ends a stream is in its last few."""
LARGEST_HEAD = 64 * 1024
LARGEST_LINE = 8 * 2**20
"""Bytes. An answer that is no stream is one line."""

TIMED_OUT = "timed out"
CLOSED_EARLY = "closed before an answer"
CLOSED_MIDWAY = "closed in mid-answer"
MALFORMED = "malformed answer"


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    authority: str
    """host and port as in the URL"""
    is_tls: bool
    prefix: str
    """path before /v1"""
    api_key: str | None = field(default=None, repr=False)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a whole request."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.authority}", "Accept: */*", "User-Agent: minisgl-bench"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def parse_url(url: str, api_key: str | None = None) -> Target:
    """The server's root, or its /v1. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"--url {url}: found; http://HOST:PORT or https://HOST:PORT is wanted, with a path if the server has one")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"--url {url!r}: printable ASCII without spaces is allowed")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ConfigError("--api-key: printable ASCII characters are allowed, without spaces at the ends")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(host, port or (443 if is_tls else 80), parts.netloc, is_tls, prefix, api_key)


class AnswerReader:
    """Takes the bytes of one answer as they come. Times are seconds after `start`, a reading of `time.monotonic()`."""

    def __init__(self, start: float, *, keeps_all: bool = False) -> None:
        """With `keeps_all`, `lines` has the whole answer at the end, else its last part."""
        self.start = start
        self.status = 0
        """0: no head has come"""
        self.token_times = array("f")
        """one for each event that brings text; equal for those that came in one read"""
        self.seconds = 0.0
        """from start to end, valid at the end"""
        self.problem = ""
        """kind of failure of the transport or of HTTP; empty: none"""
        self.detail = ""
        self.is_begun = False
        """a byte has come"""
        self.is_reusable = True
        """the connection can take another request"""
        self._reads: deque[bytes] = deque(maxlen=None if keeps_all else NUM_LATEST_READS)
        self._rest = b""
        """bytes that cannot be understood yet"""
        self._key = b""
        """what stood before the text in the latest event, such as `"content":"`"""
        self._line = b""
        """a line of the body that has not ended"""
        self._is_chunked = False
        self._is_behind_chunk = False
        """an empty line is next, when no byte of the chunk is left"""
        self._is_in_trailers = False
        self._left: int | None = 0
        """bytes that the body, or the chunk, still has; None: until the connection is closed"""

    @property
    def lines(self) -> list[bytes]:
        return [line for line in b"".join([*self._reads, self._line]).splitlines() if line]

    def feed(self, data: bytes, now: float) -> bool:
        """True: the answer has ended, or failed. More bytes after its end make the connection unusable."""
        self.is_begun = True
        if self._rest:
            data = self._rest + data
        position = 0
        if not self.status:
            begin = self._read_head(data)
            if begin is None:
                self._rest = data
                return self._end(now) if self.problem else False
            position = begin
        body, is_end = self._read_chunks(data, position) if self._is_chunked else self._read_plain(data, position)
        if body:
            self._count(body, now)
        return self._end(now) if is_end or self.problem else False

    def close(self, now: float, detail: str = "") -> None:
        """The connection has ended."""
        if self.status and not self._is_chunked and self._left is None:
            self._end(now)
        else:
            self.fail(CLOSED_MIDWAY if self.is_begun else CLOSED_EARLY, detail or "the server closed the connection", now)

    def fail(self, problem: str, detail: str, now: float) -> None:
        self.problem, self.detail = problem, detail
        self._end(now)

    def _end(self, now: float) -> bool:
        self.seconds = now - self.start
        self.is_reusable = self.is_reusable and not self.problem and not self._rest
        return True

    def _malformed(self, detail: str) -> None:
        self.problem, self.detail = MALFORMED, detail

    def _read_head(self, data: bytes) -> int | None:
        """Where the body begins; None: the head is not whole, or wrong."""
        start = 0
        while (end := data.find(b"\r\n\r\n", start)) >= 0:
            status_line, *lines = data[start:end].split(b"\r\n")
            found = STATUS_LINE.fullmatch(status_line)
            if found is None:
                self._malformed(f"no status line: {status_line[:80]!r}")
                return None
            start = end + 4
            if found[2].startswith(b"1"):  # an interim answer
                continue
            headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            self.status = int(found[2])
            connection = headers.get(b"connection", b"").lower()
            self.is_reusable = b"close" not in connection and (found[1] == b"1" or b"keep-alive" in connection)
            self._is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
            self._rest = b""
            self._set_length(headers.get(b"content-length"))
            return start
        first = data[start : start + 7]
        if len(data) > LARGEST_HEAD or first != b"HTTP/1."[: len(first)]:
            self._malformed(f"no HTTP/1.1: {data[:80]!r}")
        return None

    def _set_length(self, length: bytes | None) -> None:
        if self._is_chunked or self.status in (204, 304):
            self._left = 0
        elif length is None:
            self._left, self.is_reusable = None, False
        elif length.isdigit():
            self._left = int(length)
        else:
            self._malformed(f"Content-Length {length[:80]!r}")

    def _read_plain(self, data: bytes, position: int) -> tuple[bytes, bool]:
        """(bytes of the body, whether it is whole)."""
        body = data[position:]
        if self._left is None:
            return body, False
        body, self._rest = body[: self._left], body[self._left :]
        self._left -= len(body)
        return body, not self._left

    def _read_chunks(self, data: bytes, position: int) -> tuple[bytes, bool]:
        """The same for a body in chunks: a line with a size, as many bytes, an empty line; the size 0 ends it, with trailers."""
        pieces: list[bytes] = []
        is_end = False
        while position < len(data) and not is_end and not self.problem:
            if self._left:
                pieces.append(data[position : position + self._left])
                position += len(pieces[-1])
                self._left -= len(pieces[-1])
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                if len(data) - position > LARGEST_HEAD:
                    self._malformed("a line between chunks does not end")
                break
            line, position = data[position:end], end + 2
            if self._is_in_trailers:
                is_end = not line
            elif self._is_behind_chunk:
                self._is_behind_chunk = False
                if line:
                    self._malformed(f"a chunk is longer than its size: {line[:80]!r}")
            else:
                self._read_size(line)
        self._rest = data[position:]
        return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), is_end

    def _read_size(self, line: bytes) -> None:
        size = CHUNK_SIZE.fullmatch(line)
        if size is None:
            self._malformed(f"no size of a chunk: {line[:80]!r}")
            return
        self._left = int(size[1], 16)
        self._is_behind_chunk, self._is_in_trailers = self._left > 0, self._left == 0

    def _count(self, body: bytes, now: float) -> None:
        """Count the events among the lines that are whole now."""
        cut = body.rfind(b"\n") + 1
        if not cut:
            self._line += body
            if len(self._line) > LARGEST_LINE:
                self._malformed(f"a line of more than {LARGEST_LINE} bytes")
            return
        whole = self._line + body[:cut]
        self._line = body[cut:]
        self._reads.append(whole)
        num_tokens = self._count_tokens(whole)
        if num_tokens == 1:
            self.token_times.append(now - self.start)
        elif num_tokens:
            self.token_times.extend([now - self.start] * num_tokens)

    def _count_tokens(self, whole: bytes) -> int:
        """Events that bring text, in whole lines. Where each event has the key that the one before had, counting it is enough."""
        num_events = whole.count(b"\ndata:") + whole.startswith(b"data:")
        if self._key and whole.count(self._key) - whole.count(self._key + b'"') == num_events:
            return num_events
        found = [TOKEN.search(line) for line in whole.split(b"\n") if line.startswith(b"data:")]
        keys = [each[0] for each in found if each is not None]
        self._key = keys[-1] if keys else self._key
        return len(keys)


class _Connection(asyncio.Protocol):
    """A connection to the server, for one answer after the other."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self._reader is None:  # nobody has asked
            self.close()
        elif self._reader.feed(data, time.monotonic()):
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._reader is not None:
            self._reader.close(time.monotonic(), "" if error is None else str(error))
            self._finish()

    async def ask(self, request: bytes, reader: AnswerReader) -> None:
        """Returns when the answer has ended, somehow."""
        assert self._transport is not None
        self._reader, self._done = reader, asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        self.is_open, self._reader = False, None
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.is_reusable:
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Asks one request after the other, on a connection that it keeps."""

    def __init__(self, target: Target, timeout: float) -> None:
        """`timeout`: seconds that one request may take, with all of its answer."""
        self._target = target
        self._timeout = timeout
        self._connection: _Connection | None = None
        self._ssl = ssl.create_default_context() if target.is_tls else None

    async def ask(self, request: bytes, *, keeps_all: bool = False) -> AnswerReader:
        """The answer, or what came of it: failures are told by its `problem`."""
        reader = AnswerReader(time.monotonic(), keeps_all=keeps_all)
        try:
            await asyncio.wait_for(self._ask(request, reader), self._timeout)
        except asyncio.TimeoutError:
            detail = f"after {self._timeout:g} s, with {len(reader.token_times)} events; --timeout sets the limit"
            reader.fail(TIMED_OUT, detail, time.monotonic())
            self.close()
        except OSError as error:
            reader.fail(_name(error), str(error), time.monotonic())
        return reader

    async def _ask(self, request: bytes, reader: AnswerReader) -> None:
        if self._connection is not None and self._connection.is_open:
            await self._connection.ask(request, reader)
            if reader.problem != CLOSED_EARLY:
                return
            reader.problem = reader.detail = ""  # closed while it was idle: nobody's failure
        await self._ask_anew(request, reader)

    async def _ask_anew(self, request: bytes, reader: AnswerReader) -> None:
        host, port = self._target.host, self._target.port
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port, ssl=self._ssl)
        self._connection = connection
        await connection.ask(request, reader)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self.close()


def _name(error: OSError) -> str:
    """Kind of failure."""
    kinds: tuple[tuple[type[OSError], str], ...] = (
        (ConnectionRefusedError, "connection refused"),
        (ConnectionResetError, "connection reset"),
        (BrokenPipeError, "connection reset"),
        (ssl.SSLError, "TLS failed"),
        (TimeoutError, TIMED_OUT),
    )
    names = [name for kind, name in kinds if isinstance(error, kind)]
    if names:
        return names[0]
    return "host not found" if type(error).__name__ == "gaierror" else "cannot connect"
