"""The terminal of a conversation: lines in, text out. Nothing but what this module writes itself may steer the terminal.

Text of models and servers is shown without control characters, so that no answer can move the cursor, change the title or the clipboard,
or pretend to be the prompt. Knows no model. Called by the program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Display", "line_reader", "open_history", "printable", "prompt_reader"]

CONTROLS: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x0D: None,
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD),
}
"""Control character -> its picture. A carriage return goes without one: it is half a line's end. A lone surrogate is no character."""


def printable(text: str) -> str:
    """`text` with nothing in it that steers a terminal, but for new lines and tabs."""
    return text.translate(CONTROLS)


class Display:
    """What is shown: answers and what was asked for on `out`, failures on `err`."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = Console(file=out, soft_wrap=True)
        self._err = Console(file=err, soft_wrap=True)
        self._is_line_open = False

    def write(self, text: str) -> None:
        """A piece of an answer, as it is: each piece is written once and nothing is drawn again."""
        if text:
            self._out.file.write(printable(text))
            self._out.file.flush()
            self._is_line_open = not text.endswith("\n")

    def end_line(self) -> None:
        """Begin a new line, unless one has begun."""
        if self._is_line_open:
            self.write("\n")

    def say(self, text: str) -> None:
        """Something that was asked for."""
        self._print(self._out, Text(printable(text)))

    def rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names, and what is said of each."""
        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(printable(name), "bold", no_wrap=True), Text(printable(text)))
        self._print(self._out, table)

    def note(self, text: str) -> None:
        """Something about an answer that is no part of it."""
        self._print(self._err, Text(f"[{_one_line(text)}]", "dim"))

    def fail(self, text: str) -> None:
        """What went wrong, in a line."""
        self._print(self._err, Text.assemble(("error:", "bold red"), " ", _one_line(text)))

    def _print(self, console: Console, what: Text | Table) -> None:
        self.end_line()
        console.print(what)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def line_reader(stream: TextIO) -> Callable[[], str]:
    """Reads a message from something that is no terminal: a line, and the next one too after a backslash. Raises EOFError at the end."""

    def read() -> str:
        lines = []
        while line := stream.readline():
            text = line.removesuffix("\n")
            lines.append(text.removesuffix("\\"))
            if not text.endswith("\\"):
                break
        if not lines:
            raise EOFError
        return "\n".join(lines)

    return read


def prompt_reader(history: History, words: Sequence[str]) -> Callable[[], str]:
    """Reads a message from the terminal, with editing, `history`, and `words` to be completed. Raises EOFError after Ctrl-D."""
    session: PromptSession[str] = PromptSession(
        history=history,
        multiline=True,
        key_bindings=_key_bindings(),
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        prompt_continuation=". ",
    )
    return lambda: _valid(session.prompt("> "))


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()
    is_editing = has_focus(DEFAULT_BUFFER)

    @bindings.add("enter", filter=is_editing)
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=is_editing)
    def _continue(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @bindings.add("c-c", filter=is_editing)
    @bindings.add("<sigint>", filter=is_editing)
    def _clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return bindings


def open_history(path: Path | None) -> History:
    """What was typed before, in a file that only the user can read; None keeps it in memory. Raises OSError if the file cannot be used."""
    if path is None:
        return InMemoryHistory()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return _UserHistory(str(path))


class _UserHistory(FileHistory):
    """A history that cannot be written, on a full disk for one, ends no conversation."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(_valid(string))


def _valid(text: str) -> str:
    """What was typed, without bytes that are no text."""
    return text.encode("utf-8", "replace").decode("utf-8")
