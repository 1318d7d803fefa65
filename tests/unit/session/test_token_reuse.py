"""A request that extends another re-uses its tokens; what the model read is never guessed."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.session.chat_template import ChatTemplate, Message
from areal_hpc.session.tree import REPLY_PLACEHOLDER, InteractionTree, unpack_ids
from tests.support.chatml import CHATML
from tests.unit.session.model_stub import ENCODER, TEMPLATE, assistant, prompt_ids, say, user

texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\u241f"),
    max_size=20,
).filter(lambda text: "<|" not in text)


def rendered_ids(messages: list[Message]) -> list[int]:
    return ENCODER.encode(TEMPLATE.render(messages))


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_splicing_canonical_replies_equals_the_full_rendering(
    turns: list[tuple[str, str]],
) -> None:
    tree = InteractionTree()
    messages: list[Message] = []
    for question, reply in turns:
        messages.append(user(question))
        interaction = say(tree, messages, reply)
        assert prompt_ids(tree, interaction) == rendered_ids(messages)
        messages.append(assistant(reply))


@given(st.lists(st.tuples(texts, texts, st.booleans()), min_size=2, max_size=5))
def test_the_models_own_tokens_stay_verbatim_however_it_split_them(
    turns: list[tuple[str, str, bool]],
) -> None:
    tree = InteractionTree()
    messages: list[Message] = []
    read: list[int] = []
    for question, reply, closed in turns:
        messages.append(user(question))
        letters = [i for letter in reply for i in ENCODER.encode(letter)]
        interaction = say(tree, messages, reply, ids=letters, closed=closed)
        prompt = prompt_ids(tree, interaction)
        assert prompt[: len(read)] == read
        assert ENCODER.decode(prompt) == TEMPLATE.render(messages)
        read = prompt + unpack_ids(interaction.output_ids).tolist()
        messages.append(assistant(reply))
    assert [one.reuse for one in tree] == ["none"] + ["reused"] * (len(turns) - 1)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_the_json_of_a_sequence_is_its_ids(turns: list[tuple[str, str]]) -> None:
    tree = InteractionTree()
    messages: list[Message] = []
    for question, reply in turns:
        messages.append(user(question))
        say(tree, messages, reply)
        messages.append(assistant(reply))
    last = tree.last
    sequence = prompt_ids(tree, last) + unpack_ids(last.output_ids).tolist()
    assert msgspec.json.decode(b"[" + tree.sequence_json(last, b"") + b"]") == sequence
    assert msgspec.json.decode(b"[" + tree.sequence_json(last, b"7,8") + b"]") == [*sequence, 7, 8]
    assert tree.sequence_json(None, b"7") == b"7"
    assert len(sequence) == last.sequence_tokens


def test_a_reply_cut_by_length_is_closed_by_the_template() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "hello", closed=False)
    second = say(tree, [user("a"), assistant("hello"), user("b")], "x")
    sequence = prompt_ids(tree, first) + unpack_ids(first.output_ids).tolist()
    added = prompt_ids(tree, second)[len(sequence) :]
    assert ENCODER.decode(added).startswith("<|im_end|>\n<|im_start|>user\nb")


def test_a_reply_ended_by_a_stop_string_keeps_the_tokens_of_that_string() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "3 + 4", ids=ENCODER.encode("3 + 4 STOP"), closed=False)
    second = say(tree, [user("a"), assistant("3 + 4"), user("b")], "x")
    assert second.reuse == "reused"
    text = ENCODER.decode(prompt_ids(tree, second))
    assert "3 + 4 STOP<|im_end|>\n<|im_start|>user\nb" in text
    assert second.parent_id == first.interaction_id


def test_a_rewritten_reply_branches_from_the_deepest_exact_ancestor() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "one")
    say(tree, [user("a"), assistant("one"), user("b")], "two ")
    history = [user("a"), assistant("one"), user("b"), assistant("two"), user("c")]
    third = say(tree, history, "x")
    assert (third.reuse, third.parent_id) == ("reused", first.interaction_id)
    assert prompt_ids(tree, third) == rendered_ids(history)


def test_the_same_request_again_shares_the_parent() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "one")
    again = [user("a"), assistant("one"), user("b")]
    assert {say(tree, again, reply).parent_id for reply in ("x", "y")} == {first.interaction_id}


def test_unrelated_conversations_are_roots() -> None:
    tree = InteractionTree()
    say(tree, [user("a")], "one")
    assert say(tree, [user("b")], "two").reuse == "none"
    assert say(tree, [user("a"), user("one")], "two").reuse == "none"


def test_other_tools_make_another_prompt() -> None:
    tree = InteractionTree()
    tools = [{"type": "function", "function": {"name": "add"}}]
    say(tree, [user("a")], "one")
    history = [user("a"), assistant("one"), user("b")]
    assert say(tree, history, "two", tools=tools).reuse == "none"
    assert say(tree, history, "two").reuse == "reused"


def test_a_template_that_hides_replies_is_tokenized_again_and_counted() -> None:
    hiding = ChatTemplate(CHATML.replace("message.content", "'?'"))
    tree = InteractionTree()
    say(tree, [user("a")], "one", template=hiding)
    second = say(tree, [user("a"), assistant("one"), user("b")], "two", template=hiding)
    assert (second.reuse, second.parent_id) == ("retokenized", None)


def test_a_template_that_drops_earlier_reasoning_still_splices() -> None:
    forgetful = ChatTemplate(
        CHATML.replace("message.content +", "message.content.split('</think>')[-1] | trim +")
    )
    tree = InteractionTree()
    reply = "<think>3 + 4</think> 7"
    first = say(tree, [user("a")], reply, template=forgetful)
    second = say(tree, [user("a"), assistant(reply), user("b")], "x", template=forgetful)
    assert second.reuse == "reused"
    sequence = prompt_ids(tree, first) + unpack_ids(first.output_ids).tolist()
    assert prompt_ids(tree, second)[: len(sequence)] == sequence


def test_what_follows_a_reply_is_what_the_template_writes_after_the_whole_history() -> None:
    numbered = "messages | length ~ message.content"
    counting = ChatTemplate(CHATML.replace("message.content", numbered))
    tree = InteractionTree()
    history = [user("a")]
    for reply in ("one", "two"):
        say(tree, history, reply, template=counting)
        history = [*history, assistant(reply), user("b")]
    last = say(tree, history, "x", template=counting)
    assert last.reuse == "reused"
    assert ENCODER.decode(prompt_ids(tree, last)).endswith(
        counting.render(history).partition("5two")[2]
    )


def test_user_text_that_looks_like_the_placeholder_costs_only_the_splice() -> None:
    tree = InteractionTree()
    say(tree, [user("a")], "one")
    history = [user("a"), assistant("one"), user(REPLY_PLACEHOLDER)]
    second = say(tree, history, "two")
    assert second.reuse == "retokenized"
    assert prompt_ids(tree, second) == rendered_ids(history)
