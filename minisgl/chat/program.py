"""The conversation: messages, commands, parameters, and what Ctrl-C, Ctrl-D and errors do to them.

    terminal                 Ctrl-C stops the answer, or clears the line; Ctrl-D leaves with status 0
    pipe or file as input    plain lines; Ctrl-C ends the program; status 1 if a message got no whole answer

Knows neither HTTP nor the offline class. Called by the command line.
"""

from __future__ import annotations

import difflib
import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.chat.backend import Backend
from minisgl.chat.parameters import KINDS, read_params
from minisgl.chat.terminal import Display, line_reader, open_history, prompt_reader
from minisgl.errors import ConfigError, MinisglError

__all__ = ["Conversation", "main"]

STOPPED = "abort"
FAILED = "error"
WHOLE = ("stop", "length")
COMMAND = re.compile(r"(/\S*)\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """`run` gets what stands behind the command's name; nothing may stand there if `arguments` is empty."""

    arguments: str
    help: str
    run: Callable[[Conversation, str], None]


class Conversation:
    """What was said, and what is to happen with the next line."""

    def __init__(self, backend: Backend, display: Display, *, is_interactive: bool) -> None:
        self.messages: list[dict[str, str]] = []
        """questions and answers in turn; an answer has a `finish_reason` too: `abort` if it was stopped, `error` if it broke off"""
        self.system: str | None = None
        self.params: dict[str, Any] = {}
        """those that were set"""
        self.is_over = False
        self.has_failed = False
        """whether something got no whole answer"""
        self._backend, self._display, self._is_interactive = backend, display, is_interactive

    def run(self, read: Callable[[], str]) -> None:
        """Take lines from `read` until it raises EOFError or one says /exit. Ctrl-C goes through only if there is no terminal."""
        while not self.is_over:
            try:
                self.take(read())
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise

    def take(self, line: str) -> None:
        """A line as it was typed: a command, or a message, which is answered. Two slashes begin a message that begins with one."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(line)
            elif line.strip():
                self._answer(line.removeprefix("/") if line.startswith("//") else line)
        except MinisglError as error:
            self.has_failed = True
            self._display.fail(str(error))

    def _command(self, line: str) -> None:
        match = COMMAND.fullmatch(line.rstrip())
        assert match is not None
        name, text = match.groups()
        command = COMMANDS.get(name)
        if command is None:
            near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{name} is no command; {hint}/help tells all, and // begins a message that begins with /")
        if text and not command.arguments:
            raise ConfigError(f"{name}: {text!r} found; nothing is wanted behind it")
        command.run(self, text)

    def _answer(self, question: str) -> None:
        asked = {"role": "user", "content": question}
        messages = [*self._beginning(), *self.messages, asked]
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        parts: list[str] = []
        reason = FAILED
        try:
            with closing(self._backend.answer(plain, self.params)) as pieces:
                for piece in pieces:
                    parts.append(piece.text)
                    self._display.write(piece.text)
                    reason = piece.finish_reason or reason
        except KeyboardInterrupt:
            reason = STOPPED
            if not self._is_interactive:
                raise
        finally:
            self._display.end_line()
            text = "".join(parts)
            if text or reason in WHOLE:
                self.messages += [asked, {"role": "assistant", "content": text, "finish_reason": reason}]
        self._comment(text, reason)

    def _comment(self, text: str, reason: str) -> None:
        """Say how an answer has ended, unless all is well."""
        self.has_failed |= reason not in WHOLE
        if reason == "length":
            self._display.note("cut at max_tokens or at the end of the context; /params max_tokens=N, or /reset to begin anew")
        elif reason == STOPPED:
            self._display.note("stopped" if text else "stopped; the message is not kept")
        elif reason != "stop":
            self._display.note(f"the answer ended with {reason}")
        elif not text:
            self._display.note("an empty answer")

    def _beginning(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def reset(self, text: str) -> None:
        """/reset"""
        if text not in ("", "all"):
            raise ConfigError(f"/reset: {text!r} found; nothing, or all, is wanted behind it")
        self.messages = []
        if text == "all":
            self.system, self.params = None, {}
        self._display.note(
            "a new conversation" if text else "a new conversation; system message and parameters stay, /reset all drops them"
        )

    def set_system(self, text: str) -> None:
        """/system"""
        if text:
            self.system = text
            self._display.note("the system message holds from the next message on; /reset begins anew")
        else:
            self._display.say("no system message" if self.system is None else self.system)

    def set_params(self, text: str) -> None:
        """/params"""
        if text:
            self.params = read_params(text, self.params)
            self._display.note(f"set: {json.dumps(self.params, ensure_ascii=False)}")
            return
        defaults = self._backend.defaults
        own = "the server's default" if defaults is None else "default"
        found = {**(defaults or {}), **self.params}
        self._display.rows([(name, json.dumps(found[name], ensure_ascii=False) if name in found else own) for name in KINDS])

    def save(self, text: str) -> None:
        """/save"""
        match = re.fullmatch(r"(-f\s+)?(.+)", text, re.DOTALL)
        if match is None:
            raise ConfigError("/save: nothing found; the name of a file is wanted behind it")
        path = Path(match[2])
        transcript = {"model": self._backend.name, "params": self.params, "messages": [*self._beginning(), *self.messages]}
        try:
            with path.expanduser().open("w" if match[1] else "x", encoding="utf-8") as file:
                file.write(json.dumps(transcript, ensure_ascii=False, indent=2) + "\n")
        except FileExistsError as error:
            raise ConfigError(f"/save: {path} exists; /save -f {path} overwrites it") from error
        except (OSError, ValueError, RuntimeError) as error:  # a null in the name; no such user's home
            raise ConfigError(f"/save: {path}: {getattr(error, 'strerror', None) or error}") from error
        self._display.note(f"saved {len(self.messages)} messages to {path}")

    def help(self, text: str) -> None:
        """/help"""
        del text
        self._display.rows([(f"{name} {command.arguments}".rstrip(), command.help) for name, command in COMMANDS.items()])
        self._display.say("Enter sends; Meta-Enter, or a backslash at the end, continues on the next line. Ctrl-C stops an answer.")

    def exit(self, text: str) -> None:
        """/exit"""
        del text
        self.is_over = True


COMMANDS = {
    "/reset": Command("[all]", "forget what was said; all: the system message and the parameters too", Conversation.reset),
    "/system": Command("[TEXT]", "set the system message, or show it", Conversation.set_system),
    "/params": Command(
        "[NAME=VALUE ...]",
        "set parameters, such as temperature=0.7 max_tokens=200; NAME= takes one back; or show them",
        Conversation.set_params,
    ),
    "/save": Command("[-f] FILE", "write the conversation to a new JSON file; -f: to one that exists too", Conversation.save),
    "/help": Command("", "tell what can be typed", Conversation.help),
    "/exit": Command("", "leave, as Ctrl-D does", Conversation.exit),
}


def main(make_backend: Callable[[], Backend], name: str, history: Path | None) -> int:
    """Hold a conversation on this process's terminal, or on whatever its input and output are; the exit status.

    `make_backend` may take its time, with `name` shown meanwhile; what it raises goes through. `history`: a file, or None for none.
    """
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show ends no conversation
    display = Display(sys.stdout, sys.stderr)
    if is_interactive:
        display.say(f"opening {name} ...")
    with closing(make_backend()) as backend:
        conversation = Conversation(backend, display, is_interactive=is_interactive)
        if is_interactive:
            display.say(f"{backend.name}: /help tells what can be typed, Ctrl-D leaves")
            conversation.run(_prompt(display, history))
            return 0
        conversation.run(line_reader(sys.stdin))
        return int(conversation.has_failed)


def _prompt(display: Display, path: Path | None) -> Callable[[], str]:
    try:
        history = open_history(path)
    except OSError as error:
        display.fail(f"no history: {path}: {error.strerror or error}")
        history = open_history(None)
    return prompt_reader(history, list(COMMANDS))
