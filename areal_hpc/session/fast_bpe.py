"""Fast byte-level BPE encoding of ASCII text, with a cache of words.

A byte-level tokenizer splits a text into words by a regular expression and turns each word into
ids by itself, so that the ids of a word can be cached. `tokenizers` spends most of its time on
alignments and on regular expressions over all of Unicode. Here `re` finds the words, and a cache
holds their ids; the tokenizer's own model encodes a new word.

The results must equal the tokenizer's: tokenizers of other kinds have no `CachedAsciiBPEEncoder`,
and it takes no texts beyond ASCII, where `re` and the tokenizer classify letters differently.
"""

from __future__ import annotations

import random
import re
from itertools import chain
from operator import itemgetter
from typing import Any

import msgspec
from tokenizers import Tokenizer

from areal_hpc.wire.decoding import decode_json

MAX_PRELOADED_TOKENS = 1 << 15
"""Tokens encoded in advance, in about 0.1 s."""
MAX_CACHED_WORDS = 1 << 16
"""Words in the cache, about 20 MB."""
MAX_CACHED_WORD_CHARS = 64
"""Length of a cached word; longer ones rarely occur again."""
GPT2_SPLIT_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern that the pre-tokenizer `ByteLevel` uses by default."""
ASCII_RANGES_BY_CLASS = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9"}
CLASSES_NOT_IN_ASCII = frozenset(
    {"Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "Nl", "No", "Han", "Hiragana"}
)
NEVER_PATTERN = r"[^\s\S]"
RANDOM_TRIALS_COUNT = 256
TRIAL_ALPHABET = "aZtsSd09'-_/.,:;!?(){}[]<>|@#$%&*+=~`^\"\\ \n\r\t\x0b\x0c\x1c\x1f\x7f\x00"


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool


class _TokenizerJsonModel(msgspec.Struct):
    type: str
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _TokenizerJson(msgspec.Struct):
    added_tokens: list[_AddedToken]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    model: _TokenizerJsonModel


class CachedAsciiBPEEncoder(dict[str, tuple[int, ...]]):
    """Cache of ids by word, which encodes texts. Build it with `from_tokenizer`."""

    def __init__(
        self, tokenizer: Tokenizer, word_pattern: re.Pattern[str], added: dict[str, int]
    ) -> None:
        super().__init__()
        self._model = tokenizer.model
        self._find_words = word_pattern.findall
        self._added = {text: (number,) for text, number in added.items()}
        longest_first = map(re.escape, sorted(added, key=len, reverse=True))
        self._split_added = re.compile(f"({'|'.join(longest_first) or NEVER_PATTERN})").split

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> CachedAsciiBPEEncoder | None:
        """Build an encoder that returns the same ids as `tokenizer`; None for an unknown kind."""
        parts = decode_json(tokenizer.to_str(), _TokenizerJson)
        model, added, pattern = parts.model, parts.added_tokens, _build_split_pattern(parts)
        unsupported = model.dropout, model.continuing_subword_prefix, model.end_of_word_suffix
        if pattern is None or model.type != "BPE" or any(unsupported):
            return None
        if any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None
        if len({token.normalized for token in added}) > 1:
            return None  # the tokenizer finds them in two passes
        encoder = cls(tokenizer, pattern, {token.content: token.id for token in added})
        if not encoder._agrees_on_trial_texts_with(tokenizer):
            return None
        encoder._preload_vocabulary_words(tokenizer)
        return encoder

    def __missing__(self, word: str) -> tuple[int, ...]:
        spelled = "".join(map(_BYTE_ENCODER.__getitem__, word.encode()))
        ids = tuple(token.id for token in self._model.tokenize(spelled))
        if len(word) <= MAX_CACHED_WORD_CHARS:
            if len(self) >= MAX_CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the token ids of an ASCII text, with the added tokens in it."""
        ids: list[int] = []
        for part in self._split_added(text):
            if part in self._added:
                ids += self._added[part]
            elif part:
                ids += chain.from_iterable(map(self.__getitem__, self._find_words(part)))
        return ids

    def _preload_vocabulary_words(self, tokenizer: Tokenizer) -> None:
        """Cache the most frequent words of one token: a new word costs as much as 20 cached."""
        by_rank = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=itemgetter(1))
        for token, _ in by_rank[:MAX_PRELOADED_TOKENS]:
            if not _BYTE_DECODER.keys() >= set(token):
                continue
            word = bytes(map(_BYTE_DECODER.__getitem__, token))
            if word.isascii() and self._find_words(text := word.decode()) == [text]:
                self[text]

    def _agrees_on_trial_texts_with(self, tokenizer: Tokenizer) -> bool:
        rng = random.Random(0)
        trials = [chr(number) for number in range(128)] + ["".join(map(chr, range(128)))]
        pieces = [*TRIAL_ALPHABET, *self._added]
        trials += ["".join(rng.choices(pieces, k=40)) for _ in range(RANDOM_TRIALS_COUNT)]
        encoded = tokenizer.encode_batch_fast(trials, add_special_tokens=False)
        return all(self.encode(text) == e.ids for text, e in zip(trials, encoded, strict=True))


def _build_split_pattern(tokenizer_json: _TokenizerJson) -> re.Pattern[str] | None:
    if tokenizer_json.normalizer not in (None, {"type": "NFC"}):
        return None
    step = tokenizer_json.pre_tokenizer or {"type": ""}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if last["use_regex"]:
        return _restrict_pattern_to_ascii(GPT2_SPLIT_PATTERN) if not splits else None
    if len(splits) != 1 or splits[0]["type"] != "Split":
        return None
    (split,) = splits
    if split["behavior"] != "Isolated" or split["invert"] or "Regex" not in split["pattern"]:
        return None
    return _restrict_pattern_to_ascii(split["pattern"]["Regex"])


def _restrict_pattern_to_ascii(pattern: str) -> re.Pattern[str] | None:
    written, in_class = "", False
    for item in re.findall(r"\\[pP]\{[^}]*\}|\\.|.", pattern, re.DOTALL):
        if item[:3] == r"\p{":
            name = item[3:-1]
            if name not in ASCII_RANGES_BY_CLASS and name not in CLASSES_NOT_IN_ASCII:
                return None
            letters = ASCII_RANGES_BY_CLASS.get(name, "")
            written += letters if in_class else f"[{letters}]" if letters else NEVER_PATTERN
            continue
        if item[:2] == r"\P" or (item in "^$" and not in_class):
            return None
        if item == "[":
            if in_class:
                return None
            in_class = True
        elif item == "]":
            in_class = False
        written += item
    try:
        compiled = re.compile(written, re.ASCII)
    except re.error:
        return None
    return compiled if not compiled.groups else None


def _build_byte_encoder() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_ENCODER = _build_byte_encoder()
_BYTE_DECODER = {letter: byte for byte, letter in enumerate(_BYTE_ENCODER)}
