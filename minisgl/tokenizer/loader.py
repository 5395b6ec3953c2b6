"""A model directory's tokenizer: text and chats to token ids, ids to text, and which ids end an output.

`tokenizer.json` decides everything about ids: normalizer, pre-tokenizer, special tokens at the start and the end, decoder. From
tokenizer_config.json come the names of special tokens and the chat template, from config.json and generation_config.json further
end ids. transformers is not used: it is slow to import, and some of its classes rebuild the pipeline instead of following the file.
`clean_up_tokenization_spaces` is not applied to the output: the text shown is the text the model wrote.

Knows no requests and no messages. Called by the tokenizer processes, the offline class and the launcher.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minisgl.errors import ModelFormatError, RequestError
from minisgl.tokenizer.chat_template import ChatTemplate, plain_messages
from minisgl.tokenizer.control_tokens import ControlTokens
from minisgl.tokenizer.detokenize import TextStream
from minisgl.tokenizer.encode import encode_freely
from minisgl.tokenizer.pieces import TokenPieces

__all__ = ["Tokenizer", "check_unicode", "load_ids", "load_tokenizer"]

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    `special_tokens`: name -> text, as templates see them (bos_token, eos_token, …); `special_texts`: further tokens that are hidden
    from the output, besides those that `backend` calls special; `eos_token_ids`: ids that end an output; `where` names the model in
    errors.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        special_texts: Iterable[str] = (),
        eos_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
        where: str = "tokenizer",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template
        hidden = [backend.token_to_id(text) for text in (*self._special_tokens.values(), *special_texts)]
        special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special.union(token_id for token_id in hidden if token_id is not None))
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids = frozenset(eos_token_ids) | (frozenset() if eos is None else {eos})
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.pieces = TokenPieces(backend, self.special_ids, where)
        is_byte_level = self.pieces.rules.alphabet is not None
        self.longest_token_bytes = max((len(text if is_byte_level else text.encode()) for text in vocab), default=0)
        """A text of more bytes than so many a token has more tokens."""
        self._control_tokens = ControlTokens(backend, self.special_ids)

    def _named_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. `add_special_tokens`: also those that tokenizer.json puts around a text (such as one BOS).

        Raises RequestError for text with an unpaired surrogate.
        """
        check_unicode(text, "prompt")
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode` of each, on several cores; texts that `check_unicode` has passed."""
        return encode_freely(self._backend, texts, add_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **template_kwargs: Any) -> str:
        """The prompt text of a chat. `template_kwargs` are further variables for the template (`tools`, `enable_thinking`, …).

        Raises RequestError for messages that are malformed, that the template refuses (with its words), or if there is no template.
        """
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template (none in tokenizer_config.json, chat_template.jinja or chat_template.json); "
                "send a plain prompt to /v1/completions instead",
                code="chat_template_missing",
            )
        text = self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, special_tokens=self._special_tokens, variables=template_kwargs
        )
        check_unicode(text, "messages")
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """The ids of a chat: rendered, then tokenized with nothing added, for the template writes the BOS itself.

        Raises what `render_chat` raises.
        """
        text = self.render_chat(messages, add_generation_prompt, **template_kwargs)
        return self.encode_batch([text], add_special_tokens=False)[0]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, allow_control_tokens: bool = False
    ) -> list[int]:
        """The ids of a stranger's chat: as `apply_chat_template`, but a control token that is spelled out in it stays plain text.

        `variables` are the template's further ones. Raises what `render_chat` raises.
        """
        plain = plain_messages(messages)
        if allow_control_tokens or not self._control_tokens.occur_in([plain, variables]):
            return self.apply_chat_template(plain, **variables)
        return self._control_tokens.encode([plain, variables], lambda hidden: self.render_chat(hidden[0], **hidden[1]))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of an output: what a `TextStream` shows of it in all. Ids beyond the vocabulary are empty text."""
        stream = TextStream(self, skip_special_tokens=skip_special_tokens)
        return stream.extend(ids) + stream.finish()


def check_unicode(text: str, param: str) -> None:
    """Raise RequestError naming `param` if `text` has an unpaired surrogate, which is no character and has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param}: an unpaired surrogate (U+{ord(text[error.start]):04X}) found at character {error.start}; send valid Unicode",
            code="invalid_unicode",
            param=param,
        ) from None


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises ModelFormatError naming the file that is missing or malformed."""
    directory = Path(model_dir)
    config_file = directory / "tokenizer_config.json"
    backend = _load_backend(directory / "tokenizer.json")
    config = _read_object(config_file)
    _add_config_tokens(backend, config, config_file)
    return Tokenizer(
        backend,
        special_tokens=_named_special_tokens(config, config_file),
        special_texts=_other_special_texts(config, config_file),
        eos_token_ids=[*_end_ids(directory / "config.json"), *_end_ids(directory / "generation_config.json")],
        chat_template=_load_chat_template(directory, config),
        where=str(directory / "tokenizer.json"),
    )


def load_ids(model_dir: str | Path) -> tuple[frozenset[int], int | None]:
    """What an engine needs to know: ids that end an output (config.json, generation_config.json, tokenizer), and how many ids the
    tokenizer knows (None where there is no tokenizer)."""
    directory = Path(model_dir)
    if (directory / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(directory)
        return tokenizer.eos_token_ids, tokenizer.vocab_size
    return frozenset([*_end_ids(directory / "config.json"), *_end_ids(directory / "generation_config.json")]), None


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelFormatError(
            f"{path}: not found; a tokenizer.json is wanted, and transformers writes one: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception for whatever it cannot parse
        raise ModelFormatError(f"{path}: not a tokenizer that can be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFormatError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: a {type(value).__name__} found; a JSON object is wanted")
    return value


def _add_config_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], where: Path) -> None:
    """Add the tokens that only tokenizer_config.json lists, as older exports do; their ids must continue those of tokenizer.json."""
    for token_id, token in sorted(_listed_tokens(config, where).items()):
        text = token["content"]
        if backend.token_to_id(text) is None:
            flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in token}
            backend.add_tokens([tokenizers.AddedToken(text, **flags)])
            if backend.token_to_id(text) != token_id:
                raise ModelFormatError(f"{where}: added token {text!r} has id {token_id}, which does not continue tokenizer.json")


def _listed_tokens(config: dict[str, Any], where: Path) -> dict[int, dict[str, Any]]:
    """`added_tokens_decoder`: id -> token, each with its `content`."""
    listed = config.get("added_tokens_decoder") or {}
    is_right = isinstance(listed, dict) and all(
        token_id.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str) for token_id, token in listed.items()
    )
    if not is_right:
        raise ModelFormatError(f"{where}: added_tokens_decoder is wanted as an object of ids to tokens with their `content`")
    return {int(token_id): token for token_id, token in listed.items()}


def _token_text(token: Any, name: str, where: Path) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelFormatError(f"{where}: {name} is {token!r}; a token's text is wanted")
    return text


def _named_special_tokens(config: dict[str, Any], where: Path) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in NAMED_SPECIAL_TOKENS} | (extra if isinstance(extra, dict) else {})
    return {name: _token_text(token, name, where) for name, token in named.items() if token is not None}


def _other_special_texts(config: dict[str, Any], where: Path) -> list[str]:
    extra = config.get("extra_special_tokens")
    additional = config.get("additional_special_tokens") or []
    if not isinstance(additional, list):
        raise ModelFormatError(f"{where}: additional_special_tokens is {additional!r}; a list of tokens is wanted")
    tokens = [*additional, *(extra if isinstance(extra, list) else [])]
    listed = _listed_tokens(config, where).values()
    return [_token_text(token, "a special token", where) for token in (*tokens, *(token for token in listed if token.get("special")))]


def _end_ids(path: Path) -> list[int]:
    """`eos_token_id` of a config file: none, one or several."""
    value = _read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in ids):
        raise ModelFormatError(f"{path}: eos_token_id is {value!r}; a token id or a list of them is wanted")
    return ids


def _load_chat_template(directory: Path, config: dict[str, Any]) -> ChatTemplate | None:
    """chat_template.jinja goes before tokenizer_config.json, as in transformers; then chat_template.json."""
    jinja_file = directory / "chat_template.jinja"
    if jinja_file.is_file():
        try:
            return ChatTemplate({"default": jinja_file.read_text(encoding="utf-8")}, str(jinja_file))
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{jinja_file}: not UTF-8: {error}") from error
    json_file = directory / "chat_template.json"
    for where, holder in ((directory / "tokenizer_config.json", config), (json_file, _read_object(json_file))):
        if (found := holder.get("chat_template")) is not None:
            return ChatTemplate(_template_sources(found, where), str(where))
    return None


def _template_sources(found: Any, where: Path) -> dict[str, str]:
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if isinstance(found, dict) and found and all(isinstance(text, str) for pair in found.items() for text in pair):
        return found
    raise ModelFormatError(f"{where}: chat_template is neither a text nor a list of objects with `name` and `template`")
