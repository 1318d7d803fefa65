"""Plain prompts continue token by token; encoding word by word equals the tokenizer's."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from areal_hpc.session import fast_bpe
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.fast_bpe import CachedAsciiBPEEncoder
from areal_hpc.session.open_turn import match_ids_prompt, match_text_prompt
from areal_hpc.session.tree import Interaction, InteractionTree
from tests.support.chatml import TRAINING_TEXT, byte_level_tokenizer
from tests.support.prompt_audit import prompt_ids
from tests.unit.session.model_stub import answer

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


@cache
def encoder_of(*, leads: bool) -> TokenEncoder:
    """Build an encoder as Llama's, with a token in front of every text, or as Qwen's."""
    tokenizer = byte_level_tokenizer()
    if leads:
        lead = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
        tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[lead]
        )
    return TokenEncoder(tokenizer)


def complete(
    tree: InteractionTree,
    encoder: TokenEncoder,
    prompt: str | list[int],
    reply: str,
    *,
    closed: bool = False,
) -> tuple[Interaction, list[int]]:
    """Answer a plain prompt; the model says every letter as a token of its own."""
    if isinstance(prompt, str):
        turn = match_text_prompt(tree, prompt, encoder)
        new_ids = encoder.encode(turn.new_text, add_special_tokens=turn.parent is None)
    else:
        turn, new_ids = match_ids_prompt(tree, prompt, encoder)
    output = [i for letter in reply for i in encoder.encode(letter)]
    output += encoder.encode("<|im_end|>") * closed
    message = {"role": "assistant", "content": reply}
    return answer(tree, turn, new_ids, message, output, closed=closed), output


@pytest.mark.parametrize("leads", [False, True])
@given(turns=st.lists(st.tuples(texts.filter(bool), texts.filter(bool)), min_size=1, max_size=4))
def test_a_continued_text_keeps_its_tokens(leads: bool, turns: list[tuple[str, str]]) -> None:
    encoder, tree, prompt = encoder_of(leads=leads), InteractionTree(), ""
    read: list[int] = []
    for question, reply in turns:
        prompt += question
        interaction, output = complete(tree, encoder, prompt, reply)
        ids = prompt_ids(tree, interaction)
        assert ids[: len(read)] == read
        assert encoder.decode(ids).removeprefix("<|endoftext|>" * leads) == prompt
        read = ids + output
        prompt += reply
    assert [node.reuse for node in tree] == ["none"] + ["reused"] * (len(turns) - 1)


def test_the_longest_history_is_continued() -> None:
    encoder, tree = encoder_of(leads=False), InteractionTree()
    complete(tree, encoder, "a", "b")
    longer, _ = complete(tree, encoder, "ab c", "d")
    complete(tree, encoder, "a", "bc")
    assert match_text_prompt(tree, "ab cd e", encoder).parent is longer
    assert match_text_prompt(tree, "ab cd e", encoder).new_text == " e"
    assert match_text_prompt(tree, "x", encoder).parent is None


class CountingEncoder(TokenEncoder):
    """Encoder that counts its calls to decode."""

    decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.decoded += 1
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def test_a_reply_is_decoded_once_however_many_prompts_come_after_it() -> None:
    encoder, tree = CountingEncoder(byte_level_tokenizer()), InteractionTree()
    for number in range(20):
        complete(tree, encoder, f"question {number}", "hello")
    assert encoder.decoded < 20


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
