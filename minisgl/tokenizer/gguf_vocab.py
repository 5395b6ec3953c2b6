"""The tokenizer that a GGUF file carries, written as tokenizer.json and tokenizer_config.json.

A GGUF file holds vocabulary, merges and token types, but only the *name* of the pre-tokenizer (`tokenizer.ggml.pre`). Each supported
name stands in `PRE_TOKENIZERS`, tested against ids of the original tokenizer; any other is refused, for a wrong split gives wrong ids
in silence. A byte that the vocabulary lacks (SmolLM2's has no token for some control characters) is left out of the text, as by the
original tokenizer, which names no unknown token.

Takes the file's metadata as a plain dict: it needs neither gguf nor numpy. Called by `models.convert`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.errors import ModelFormatError

__all__ = ["gguf_end_ids", "gguf_tokenizer_files"]

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Values of `tokenizer.ggml.token_type` that matter here."""

QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _BytePairKind:
    """What the name of a pre-tokenizer implies."""

    steps: tuple[dict[str, Any], ...]
    """pre-tokenizer steps, in tokenizer.json's form"""
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    """a word that is a token is taken whole, whatever the merges say"""
    adds_bos: bool = False
    """unless the file says otherwise"""


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS: Mapping[str, _BytePairKind] = {
    "smollm": _BytePairKind(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))),
    "qwen2": _BytePairKind((_split(QWEN2_SPLIT), _byte_level(use_regex=False)), normalizer={"type": "NFC"}),
    "llama-bpe": _BytePairKind((_split(LLAMA3_SPLIT), _byte_level(use_regex=False)), ignore_merges=True, adds_bos=True),
}


def gguf_tokenizer_files(metadata: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) from a file's metadata (key -> value). `where` names the file in errors.

    Raises ModelFormatError for a vocabulary that is missing or malformed, and for kinds that are not supported, by name.
    """
    kind = _kind(metadata, where)
    tokens, types = _tokens(metadata, where)
    added = [
        _added_token(place, tokens[place], types[place] == CONTROL)
        for place in range(len(tokens))
        if types[place] in (CONTROL, USER_DEFINED)
    ]
    names = _special_names(metadata, tokens, where)
    if _flag(metadata, "add_eos_token", False, where):
        raise ModelFormatError(f"{where}: tokenizer.ggml.add_eos_token is true; a tokenizer that ends every prompt is not supported")
    adds_bos = _flag(metadata, "add_bos_token", kind.adds_bos, where) and "bos_token" in names
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": kind.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(kind.steps)},
        "post_processor": _bos_first(names["bos_token"], metadata["tokenizer.ggml.bos_token_id"]) if adds_bos else None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind.ignore_merges,
            "vocab": {token: place for place, token in enumerate(tokens) if types[place] != UNUSED},
            "merges": _merges(metadata, where),
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return tokenizer, config | names | _chat_template(metadata, where)


def gguf_end_ids(metadata: Mapping[str, Any], where: str) -> list[int]:
    """Ids that end an output: end of sequence, of turn, of message, as far as the file names them. Raises ModelFormatError."""
    ids = {_token_id(metadata, name, where) for name in ("eos", "eot", "eom")}
    return sorted(token_id for token_id in ids if token_id is not None)


def _token_id(metadata: Mapping[str, Any], name: str, where: str) -> int | None:
    value, num_tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), len(metadata["tokenizer.ggml.tokens"])
    if value is not None and (type(value) is not int or not 0 <= value < num_tokens):
        raise ModelFormatError(f"{where}: tokenizer.ggml.{name}_token_id is {value!r}; the vocabulary has {num_tokens} tokens")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelFormatError(f"{where}: tokenizer.ggml.{name} is {value!r}; true or false is wanted")
    return value


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ModelFormatError(f"{where}: {key} must be a list of strings")
    return value


def _kind(metadata: Mapping[str, Any], where: str) -> _BytePairKind:
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    kind = PRE_TOKENIZERS.get(str(pre)) if model == "gpt2" else None
    if kind is None:
        supported = ", ".join(map(repr, sorted(PRE_TOKENIZERS)))
        raise ModelFormatError(
            f"{where}: the tokenizer kind tokenizer.ggml.model={model!r}, tokenizer.ggml.pre={pre!r} is not supported; supported are "
            f"model 'gpt2' with pre {supported}. Use the model's original directory (with tokenizer.json) instead"
        )
    return kind


def _tokens(metadata: Mapping[str, Any], where: str) -> tuple[list[str], list[int]]:
    tokens, types = _strings(metadata, "tokenizer.ggml.tokens", where), metadata.get("tokenizer.ggml.token_type")
    if not tokens or not isinstance(types, list) or len(tokens) != len(types):
        raise ModelFormatError(f"{where}: tokenizer.ggml.tokens and tokenizer.ggml.token_type must be lists of one length")
    if len(set(tokens)) != len(tokens):
        raise ModelFormatError(f"{where}: tokenizer.ggml.tokens lists a token twice")
    return tokens, types


def _merges(metadata: Mapping[str, Any], where: str) -> list[list[str]]:
    merges = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges", where)]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise ModelFormatError(f"{where}: tokenizer.ggml.merges must list pairs separated by one blank")
    return merges


def _special_names(metadata: Mapping[str, Any], tokens: list[str], where: str) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(metadata, key, where) for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _added_token(token_id: int, text: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, **flags, "special": special}


def _bos_first(text: str, token_id: int) -> dict[str, Any]:
    bos, first, second = (
        {"SpecialToken": {"id": text, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    )
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]}},
    }


def _chat_template(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    keys = {"default": "tokenizer.chat_template"}
    keys |= {name: f"tokenizer.chat_template.{name}" for name in _strings(metadata, "tokenizer.chat_templates", where)}
    sources = {name: metadata[key] for name, key in keys.items() if key in metadata}
    for name, source in sources.items():
        if not isinstance(source, str):
            raise ModelFormatError(f"{where}: {keys[name]} must be a string")
    if not sources:
        return {}
    if set(sources) == {"default"}:
        return {"chat_template": sources["default"]}
    return {"chat_template": [{"name": name, "template": source} for name, source in sources.items()]}
