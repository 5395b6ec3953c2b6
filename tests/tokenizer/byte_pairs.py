"""Byte-pair encoding written out once more, slowly, to check the library's pipeline: split, then merge the lowest rank first."""

import itertools

import regex

from tests.tokenizer.fakes import byte_chars

GPT2_SPLIT = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class BytePairs:
    """`merges`: "a b" lines by rank. `specials`: texts that are one token wherever they stand."""

    def __init__(self, vocab: dict[str, int], merges: list[str], specials: list[str]) -> None:
        self.vocab = vocab
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(merges)}
        self.specials = regex.compile("(" + "|".join(map(regex.escape, specials)) + ")")
        self.chars = byte_chars()

    def encode_smollm(self, text: str) -> list[int]:
        """Special tokens out; then each digit alone; then GPT-2's words."""
        ids: list[int] = []
        for place, part in enumerate(self.specials.split(text)):
            if place % 2:
                ids.append(self.vocab[part])
                continue
            for segment in regex.split(r"(\p{N})", part):
                for word in GPT2_SPLIT.findall(segment):
                    ids += self.merge(word)
        return ids

    def merge(self, word: str) -> list[int]:
        """Bytes that the vocabulary lacks (it has no unknown token for them) are left out before anything merges."""
        parts = [self.chars[byte] for byte in word.encode() if self.chars[byte] in self.vocab]
        while True:
            ranked = [(self.ranks[pair], place) for place, pair in enumerate(itertools.pairwise(parts)) if pair in self.ranks]
            if not ranked:
                return [self.vocab[part] for part in parts]
            _, place = min(ranked)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
