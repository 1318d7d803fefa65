"""Prompts of text or token ids continue what they begin with, token by token, and nothing else."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.completion_prompts import match_ids_prompt, match_text_prompt
from areal_hpc.session.tree import Interaction, InteractionTree
from tests.support.chatml import byte_level_tokenizer
from tests.support.prompt_audit import prompt_ids
from tests.unit.session.model_stub import answer

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


@cache
def encoder_of(*, leads: bool) -> TokenEncoder:
    """A tokenizer as Llama's, which puts a token in front of every text, or as Qwen's."""
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
    told = {"role": "assistant", "content": reply}
    return answer(tree, turn, new_ids, told, output, closed=closed), output


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
    assert [one.reuse for one in tree] == ["none"] + ["reused"] * (len(turns) - 1)


@given(turns=st.lists(st.tuples(texts.filter(bool), texts), min_size=1, max_size=4))
def test_ids_that_go_on_have_their_parent(turns: list[tuple[str, str]]) -> None:
    encoder, tree = encoder_of(leads=False), InteractionTree()
    prompt: list[int] = []
    for question, reply in turns:
        prompt += encoder.encode(question)
        interaction, output = complete(tree, encoder, prompt, reply, closed=True)
        assert prompt_ids(tree, interaction) == prompt
        prompt = prompt + output
    assert [one.reuse for one in tree] == ["none"] + ["reused"] * (len(turns) - 1)


def test_the_longest_history_is_continued() -> None:
    encoder, tree = encoder_of(leads=False), InteractionTree()
    complete(tree, encoder, "a", "b")
    longer, _ = complete(tree, encoder, "ab c", "d")
    complete(tree, encoder, "a", "bc")
    assert match_text_prompt(tree, "ab cd e", encoder).parent is longer
    assert match_text_prompt(tree, "ab cd e", encoder).new_text == " e"
    assert match_text_prompt(tree, "x", encoder).parent is None


class CountingEncoder(TokenEncoder):
    """Counts what it decodes."""

    decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.decoded += 1
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def test_a_reply_is_decoded_once_however_many_prompts_come_after_it() -> None:
    encoder, tree = CountingEncoder(byte_level_tokenizer()), InteractionTree()
    for number in range(20):
        complete(tree, encoder, f"question {number}", "hello")
    assert encoder.decoded < 20
