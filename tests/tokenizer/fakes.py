"""Small tokenizers made on the spot: byte-level, SentencePiece style, words."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.tokenizer.loader import Tokenizer as OurTokenizer


def byte_chars() -> list[str]:
    """The character of each byte, by asking the library: encode each byte's place through its alphabet in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return [table[byte] for byte in range(256)]


def byte_level(extra: list[bytes] = (), specials: list[str] = ("<|end|>",)) -> Tokenizer:
    """Ids 0-255 are the bytes, then `extra` tokens of several bytes, then the special tokens."""
    chars = byte_chars()
    words = chars + ["".join(chars[byte] for byte in token) for token in extra]
    backend = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return backend


SENTENCE_WORDS = ["▁", "▁Paris", "▁Rome", "Oslo", "▁is", "s", "▁▁", ",", "世", "▁a", "."]


def sentence_piece() -> Tokenizer:
    """Llama-2 style: ids 0-2 <unk> <s> </s>, 3-258 bytes, then SENTENCE_WORDS."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCE_WORDS]
    backend = Tokenizer(
        models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> Tokenizer:
    """Older SentencePiece exports: a Metaspace decoder."""
    words = ["<unk>", *SENTENCE_WORDS]
    backend = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>"])
    return backend


def words() -> Tokenizer:
    """Whole words, no decoder: joined by blanks."""
    backend = Tokenizer(models.WordLevel(vocab={"<unk>": 0, "hello": 1, "there": 2, "you": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def ours(backend: Tokenizer, **options) -> OurTokenizer:
    return OurTokenizer(backend, **options)
