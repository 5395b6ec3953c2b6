"""What one token adds to the text, as bytes: the `decoder` part of a tokenizer.json, read so that it can be applied token by token.

The tokenizers library decodes a whole list at once. Streaming needs the same result piece by piece, and three shapes of decoder cover
the supported families: byte-level (GPT-2, Llama 3, Qwen), SentencePiece with byte fallback (Llama 2, Mistral, Gemma), and no decoder
(words joined by blanks). With a token's bytes at hand, the text is an incremental UTF-8 decoding and nothing else.

One difference from the library is on purpose: when a run of byte-fallback tokens is not valid UTF-8 as a whole, the library replaces
every byte of the run, however long it is, so nothing could be shown before the run ends. Here only the invalid bytes are replaced.

Knows nothing of requests, stop strings or files. Called by `loader` and `detokenize`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from minisgl.errors import ModelFormatError

__all__ = ["DecoderRules", "TokenPieces", "read_decoder_rules"]

EACH_BYTE = "minisgl.replace-each-byte"
"""Name of the UTF-8 error handler that writes one replacement character per invalid byte, as byte fallback does."""

SUPPORTED = "ByteLevel, Replace (of a string), Metaspace, ByteFallback, Fuse, Strip (at the start, after Fuse)"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
TokenMap = Callable[[str, bool], str]


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table): printable Latin-1 characters stand for
    themselves, the other bytes in ascending order for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """A decoder, taken apart."""

    maps: tuple[TokenMap, ...] = ()
    """(token, is it the first of the text) -> token, applied in order"""
    alphabet: dict[str, int] | None = None
    """byte-level: character -> byte"""
    byte_fallback: bool = False
    """tokens spelled <0xE4> are single bytes"""
    strip_char: str = " "
    num_strip: int = 0
    """most `strip_char` to drop at the start of the text"""

    @property
    def utf8_errors(self) -> str:
        """Error handler for the UTF-8 decoding of the joined pieces."""
        return EACH_BYTE if self.byte_fallback else "replace"

    def to_bytes(self, token: str, is_first: bool) -> bytes:
        """The bytes that `token` adds to the text."""
        for apply in self.maps:
            token = apply(token, is_first)
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self.alphabet is not None and all(char in self.alphabet for char in token):
            return bytes(self.alphabet[char] for char in token)
        return token.encode("utf-8")


def _join_with_blanks(token: str, is_first: bool) -> str:
    return token if is_first else " " + token


def _replacement(step: dict[str, Any], where: str) -> TokenMap:
    pattern, content = step["pattern"].get("String"), step["content"]
    if pattern is None:
        raise ModelFormatError(f"{where}: the decoder replaces by the pattern {step['pattern']}; supported are {SUPPORTED}")
    return lambda token, _: token.replace(pattern, content)


def _metaspace(step: dict[str, Any]) -> TokenMap:
    mark = step["replacement"]
    drops_first = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    return lambda token, is_first: token.replace(mark, "" if is_first and drops_first else " ")


def _flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step["decoders"]:
            yield from _flatten(inner)
    else:
        yield step


def read_decoder_rules(decoder: dict[str, Any] | None, where: str) -> DecoderRules:
    """Read the `decoder` of a tokenizer.json. `where` names the file in errors.

    Raises ModelFormatError for a decoder that cannot be applied token by token.
    """
    if decoder is None:
        return DecoderRules(maps=(_join_with_blanks,))
    maps: list[TokenMap] = []
    alphabet: dict[str, int] | None = None
    byte_fallback, num_strip, strip_char = False, 0, " "
    stage = 0  # 0: tokens one by one; 1: bytes are resolved; 2: one text
    for step in _flatten(decoder):
        kind = step["type"]
        if kind == "Replace" and stage == 0:
            maps.append(_replacement(step, where))
        elif kind == "Metaspace" and stage == 0:
            maps.append(_metaspace(step))
        elif kind == "ByteFallback" and stage == 0:
            byte_fallback, stage = True, 1
        elif kind == "ByteLevel" and stage == 0:
            alphabet, stage = byte_level_alphabet(), 2
        elif kind == "Fuse":
            stage = 2
        elif kind == "Strip" and stage == 2 and step["stop"] == 0 and num_strip == 0:
            num_strip, strip_char = step["start"], step["content"]
        else:
            raise ModelFormatError(f"{where}: the decoder has the step {step} at a place that is not supported; supported are {SUPPORTED}")
    return DecoderRules(tuple(maps), alphabet, byte_fallback, strip_char, num_strip)


class TokenPieces:
    """The bytes of each token id of one tokenizer. Holds a cache of at most one entry per id."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int], where: str) -> None:
        decoder = backend.decoder
        self.rules = read_decoder_rules(None if decoder is None else json.loads(decoder.__getstate__()), where)
        self.special_ids = special_ids
        self._id_to_token = backend.id_to_token
        self._pieces: dict[int, bytes] = {}

    def piece(self, token_id: int, *, is_first: bool) -> bytes | None:
        """What `token_id` adds to the text; None for an id that the tokenizer does not know (a padded vocabulary has some).

        `is_first`: it is the first known token of the text.
        """
        known = None if is_first else self._pieces.get(token_id)
        if known is not None:
            return known
        token = self._id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return None
        piece = self.rules.to_bytes(token, is_first)
        if not is_first:
            self._pieces[token_id] = piece
        return piece
