"""Encoding word by word gives what the tokenizer gives, or is not offered."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from areal_hpc.session import fast_bpe
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.fast_bpe import CachedAsciiBPEEncoder
from tests.support.chatml import TRAINING_TEXT

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen": QWEN, "llama3": QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"), "o200k": O200K}
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "<thin")


def byte_level(*, use_regex: bool = True) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, byte_level(use_regex=False)])


@cache
def tokenizer(name: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    if name == "gpt2":
        made.pre_tokenizer = byte_level()
    else:
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = split_by(SPLITS[name])
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([QWEN, O200K, *TRAINING_TEXT * 5], trainer)
    made.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return made


@cache
def encoders(name: str) -> tuple[TokenEncoder, CachedAsciiBPEEncoder]:
    by_words = CachedAsciiBPEEncoder.from_tokenizer(tokenizer(name))
    assert by_words is not None
    return TokenEncoder(tokenizer(name)), by_words


def expected(name: str, text: str) -> list[int]:
    return tokenizer(name).encode(text, add_special_tokens=False).ids


ascii_texts = st.lists(
    st.one_of(
        st.sampled_from(MARKS),
        st.text(st.characters(max_codepoint=127), max_size=12),
        st.sampled_from(["I'LL", "don't", "\r\n\r\n ", "  \n x", "12345", "\x1c\x1f ", "URLs"]),
    )
).map("".join)


@pytest.mark.parametrize("name", ["gpt2", *SPLITS])
@given(text=ascii_texts)
def test_words_give_the_ids_of_the_tokenizer(name: str, text: str) -> None:
    assert encoders(name)[1].encode(text) == expected(name, text)


@given(text=st.text(max_size=40))
def test_every_text_has_the_ids_of_the_tokenizer(text: str) -> None:
    assert encoders("qwen")[0].encode(text) == expected("qwen", text)


def test_words_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    by_words = CachedAsciiBPEEncoder.from_tokenizer(tokenizer("qwen"))
    assert by_words is not None
    by_words.clear()
    monkeypatch.setattr(fast_bpe, "MAX_CACHED_WORDS", 10)
    texts = [f"word{letter} more{letter}" for letter in "abcdefghij"] + ["x" * 1000]
    for text in texts:
        assert by_words.encode(text) == expected("qwen", text)
        assert len(by_words) <= 10
    assert "x" * 1000 not in by_words


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("pre_tokenizer", pre_tokenizers.Metaspace()),
        ("pre_tokenizer", split_by(r"^\p{L}+|\p{L}+|[^\p{L}]+")),
        ("pre_tokenizer", split_by(r"\p{Greek}+|[^\p{Greek}]+")),
        ("pre_tokenizer", split_by(r"\p{L}+")),
        ("normalizer", normalizers.Lowercase()),
        ("added", AddedToken("<left>", lstrip=True, normalized=False)),
        ("added", AddedToken("<normal>", normalized=True)),
    ],
    ids=["prefix", "spaces", "anchors", "classes", "gaps", "lower case", "stripping", "two passes"],
)
def test_other_tokenizers_are_left_to_themselves(part: str, changed: Any) -> None:
    made = Tokenizer.from_str(tokenizer("qwen").to_str())
    if part == "added":
        made.add_tokens([changed])
    else:
        setattr(made, part, changed)
    assert CachedAsciiBPEEncoder.from_tokenizer(made) is None
    text = "Hello World <normal> <left>  x"
    assert TokenEncoder(made).encode(text) == made.encode(text, add_special_tokens=False).ids
