"""A request that extends another reuses its tokens; some differences of messages do not count."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.session.call_records import find_interaction_defect
from areal_hpc.session.chat_template import ChatTemplate, Message
from areal_hpc.session.message_matching import (
    find_differing_field,
    normalize_chat_message,
    strip_volatile_lines,
)
from areal_hpc.session.open_turn import REPLY_MARK, build_open_turn
from areal_hpc.session.tree import InteractionTree, pack_counts_as_uint16, pack_ids, unpack_ids
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
    assert build_open_turn(tree, [long], TEMPLATE, ENCODER).text_after_messages == end
    begun = build_open_turn(tree, [long], TEMPLATE, ENCODER, prefill="<think>\nWell")
    assert begun.text_after_messages == f"{end}<think>\nWell"
    short = build_open_turn(tree, [user("as")], TEMPLATE, ENCODER)  # which is in `assistant`, too
    assert short.text_after_messages == short.new_text


def test_a_reply_ended_by_a_stop_string_keeps_the_tokens_of_that_string() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "hello", ids=ENCODER.encode("hello STOP"), closed=False)
    second = say(tree, HISTORY_OF_HELLO, "x")
    assert (second.reuse, second.parent_id) == ("reused", first.interaction_id)
    text = ENCODER.decode(prompt_ids(tree, second))
    assert "hello STOP<|im_end|>\n<|im_start|>user\nb" in text


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


def call(arguments: str) -> object:
    return normalize_chat_message(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    )["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"x": 1}', {"x": 1}),
        ('{ "x":1 }', {"x": 1}),
        ('{"x": "12345678901234567890"}', {"x": "12345678901234567890"}),
        ('{"x": 12345678901234567890123}', '{"x": 12345678901234567890123}'),
        ('{"x": NaN}', '{"x": NaN}'),
        ('{"x": "\\ud800"}', '{"x": "\\ud800"}'),
        ("[" * 100_000, "[" * 100_000),
        ("[" * 5000 + "]" * 5000, "[" * 5000 + "]" * 5000),
        ('{"x": 1', '{"x": 1'),
    ],
)
def test_arguments_are_values_that_a_journal_can_hold(arguments: str, value: object) -> None:
    assert call(arguments) == value
    msgspec.msgpack.encode(call(arguments))


def test_a_billing_line_is_taken_away_and_nothing_else() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;\n"
    assert strip_volatile_lines(line + "You help.\n  Well.") == "You help.\n  Well."
    assert strip_volatile_lines(line.strip()) == ""
    kept = "Say x-anthropic-billing-header: when asked."
    assert strip_volatile_lines(kept) == kept


@pytest.mark.parametrize(
    ("name", "arguments", "is_same"),
    [
        ("call-1", {"x": 1, "all": False}, True),
        ("call-1", {"x": 1}, True),
        ("call-1", {"x": 2, "all": False}, False),
        ("call-1", {"all": False}, False),
        ("call-2", {"x": 1, "all": False}, False),  # another call
    ],
)
def test_a_call_may_gain_arguments(name: str, arguments: dict[str, object], is_same: bool) -> None:
    def reply(name: str, arguments: dict[str, object]) -> dict[str, Any]:
        function = {"name": "edit", "arguments": arguments}
        call = {"type": "function", "id": name, "function": function}
        return normalize_chat_message({"role": "assistant", "tool_calls": [call]})

    differing = find_differing_field(reply("call-1", {"x": 1}), reply(name, arguments))
    assert differing == (None if is_same else "tool_calls")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "parts, as a normalizer may make"}]},
        {"role": "user", "content": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "7", "tool_call_id": "c", "more": {"of": "the user's own"}},
    ],
)
def test_messages_that_can_be_compared_are_sound(message: dict[str, Any]) -> None:
    call = say(InteractionTree(), [user("hi")], "hello")
    odd = msgspec.structs.replace(call, new_messages=[message])
    tree = InteractionTree()
    assert find_interaction_defect(odd, tree) is None
    tree.add(odd)
    other = msgspec.structs.replace(odd, interaction_id="other", reply=message)
    assert find_interaction_defect(other, tree) is None
    tree.add(other)


@pytest.mark.parametrize(
    ("places", "first", "is_sound"),
    [(0, 0, True), (-1, 0, False), (0, 1, False)],
    ids=["sound", "a place too few", "without the first token itself"],
)
def test_masks_are_noted_of_every_token(places: int, first: int, is_sound: bool) -> None:
    call = say(InteractionTree(), [user("hi")], "hello")
    ids = unpack_ids(call.output_ids).tolist()
    odd = msgspec.structs.replace(
        call,
        kept_counts=pack_counts_as_uint16([1] * (len(ids) + places)),
        kept_ids=pack_ids([ids[0] + first, *ids[1:]]),
    )
    defect = find_interaction_defect(odd, InteractionTree())
    assert (defect is None) is is_sound
    assert is_sound or "sampling mask" in str(defect)
