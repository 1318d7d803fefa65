"""A request that extends another re-uses its tokens; what the model read is never guessed."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.session.chat_template import ChatTemplate, Message
from areal_hpc.session.text_after_reply import REPLY_MARK
from areal_hpc.session.tree import InteractionTree, unpack_ids
from tests.support.chatml import CHATML
from tests.support.prompt_audit import prompt_ids
from tests.unit.session.model_stub import ENCODER, TEMPLATE, assistant, say, turn, user

texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\u241f"),
    max_size=20,
).filter(lambda text: "<|" not in text)

HISTORY_OF_HELLO = [user("a"), *turn("hello")]


def rendered_ids(messages: list[Message]) -> list[int]:
    return ENCODER.encode(TEMPLATE.render_prompt(messages))


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_the_json_of_a_sequence_is_its_ids(turns: list[tuple[str, str]]) -> None:
    tree = InteractionTree()
    messages: list[Message] = []
    for question, reply in turns:
        messages.append(user(question))
        say(tree, messages, reply)
        messages.append(assistant(reply))
    last = tree.last_completed
    sequence = prompt_ids(tree, last) + unpack_ids(last.output_ids).tolist()
    assert (
        msgspec.json.decode(b"[" + tree.build_sequence_ids_json_inside(last, b"") + b"]")
        == sequence
    )
    both = tree.build_sequence_ids_json_inside(last, b"7,8")
    assert msgspec.json.decode(b"[" + both + b"]") == [*sequence, 7, 8]
    assert tree.build_sequence_ids_json_inside(None, b"7") == b"7"
    assert len(sequence) == last.num_sequence_tokens


def test_marks_within_the_last_message_are_not_what_the_template_says_behind_it() -> None:
    tree, end = InteractionTree(), "<|im_end|>\n<|im_start|>assistant\n"
    long = user("a file that an agent has read: <think> and more")
    assert tree.build_open_turn([long], TEMPLATE, ENCODER).text_after_messages == end
    begun = tree.build_open_turn([long], TEMPLATE, ENCODER, prefill="<think>\nWell")
    assert begun.text_after_messages == f"{end}<think>\nWell"
    short = tree.build_open_turn([user("as")], TEMPLATE, ENCODER)  # which is in `assistant`, too
    assert short.text_after_messages == short.new_text


def test_a_reply_ended_by_a_stop_string_keeps_the_tokens_of_that_string() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "hello", ids=ENCODER.encode("hello STOP"), closed=False)
    second = say(tree, HISTORY_OF_HELLO, "x")
    assert (second.reuse, second.parent_id) == ("reused", first.interaction_id)
    text = ENCODER.decode(prompt_ids(tree, second))
    assert "hello STOP<|im_end|>\n<|im_start|>user\nb" in text


def test_a_rewritten_reply_branches_from_the_deepest_exact_ancestor() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "one")
    say(tree, [user("a"), *turn("one")], "two ")
    history = [user("a"), *turn("one"), *turn("two", "c")]
    third = say(tree, history, "x")
    assert (third.reuse, third.parent_id) == ("reused", first.interaction_id)
    assert prompt_ids(tree, third) == rendered_ids(history)


def test_a_template_that_hides_replies_is_tokenized_again_and_counted() -> None:
    hiding = ChatTemplate(CHATML.replace("message.content", "'?'"))
    tree = InteractionTree()
    say(tree, [user("a")], "hello", template=hiding)
    second = say(tree, HISTORY_OF_HELLO, "two", template=hiding)
    assert (second.reuse, second.parent_id) == ("retokenized", None)


def test_what_follows_a_reply_is_what_the_template_writes_after_the_whole_history() -> None:
    numbered = "messages | length ~ message.content"
    counting = ChatTemplate(CHATML.replace("message.content", numbered))
    tree = InteractionTree()
    history = [user("a")]
    for reply in ("one", "two"):
        say(tree, history, reply, template=counting)
        history = [*history, *turn(reply)]
    last = say(tree, history, "x", template=counting)
    assert last.reuse == "reused"
    assert ENCODER.decode(prompt_ids(tree, last)).endswith(
        counting.render_prompt(history).partition("5two")[2]
    )


def test_user_text_that_looks_like_the_placeholder_costs_only_the_splice() -> None:
    tree = InteractionTree()
    say(tree, [user("a")], "one")
    history = [user("a"), *turn("one", REPLY_MARK)]
    second = say(tree, history, "two")
    assert second.reuse == "retokenized"
    assert prompt_ids(tree, second) == rendered_ids(history)
