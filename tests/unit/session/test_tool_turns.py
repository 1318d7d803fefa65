"""Histories of the same content in other messages continue the conversation that we know."""

from typing import Any

import pytest

from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import (
    MISSING_ID,
    UNANSWERED_CALL,
    UNKNOWN_CALL,
    align_tool_turns,
    list_unpaired,
    normalize_chat_message,
)
from areal_hpc.session.open_turn import OpenTurn, build_open_turn
from areal_hpc.session.tree import InteractionTree
from tests.unit.session.families import ENCODER, FAMILIES
from tests.unit.session.model_stub import answer, user

TEMPLATE = FAMILIES[0].template
SANITISED = "[System: Empty message content sanitised to satisfy protocol]"


def call(name: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": f'{{"x": "{name}"}}'}
    return {"id": name, "type": "function", "function": function}


def calls(*names: str, content: str = "", **more: Any) -> Message:
    fields = {"role": "assistant", "content": content, "tool_calls": [*map(call, names)]}
    return normalize_chat_message(fields | more)


def result(name: str | None, text: str = "") -> Message:
    fields = {"role": "tool", "content": text or f"of {name}", "tool_call_id": name}
    return normalize_chat_message(fields)


def play(*exchanges: tuple[list[Message], Message]) -> InteractionTree:
    tree, messages = InteractionTree(), list[Message]()
    for questions, reply in exchanges:
        messages = [*messages, *questions]
        turn = build_open_turn(tree, messages, TEMPLATE, ENCODER)
        output = ENCODER.encode("<tool_call>") + ENCODER.encode("<|im_end|>")
        answer(tree, turn, ENCODER.encode(turn.new_text), reply, output)
        messages = [*messages, reply]
    return tree


def go_on(tree: InteractionTree, *history: Message) -> OpenTurn:
    return build_open_turn(tree, [*history], TEMPLATE, ENCODER)


ASKED = user("q")
FIRST = ([ASKED], calls("a"))
SECOND = ([result("a")], calls("b"))


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([calls("a", name="model"), result("a"), calls("b", name="x")], id="name"),
        pytest.param([calls("a", "b"), result("a")], id="merged"),
        pytest.param(
            [calls("a", content=SANITISED), result("a"), calls("b", content=SANITISED)],
            id="filler sentence",
        ),
        pytest.param([calls("a"), result("a"), calls("a", "b")], id="a call repeated"),
    ],
)
def test_other_seams_of_two_turns_are_the_same_conversation(history: list[Message]) -> None:
    tree = play(FIRST, SECOND)
    turn = go_on(tree, ASKED, *history, result("b"))
    assert (turn.reuse, turn.parent) == ("reused", tree.last_completed)
    assert turn.new_messages == [result("b")]
    assert turn.differing_field is None


def test_a_text_that_a_client_writes_beside_our_calls_is_read() -> None:
    tree = play(FIRST)
    turn = go_on(tree, ASKED, calls("a", content="not ok; new plan"), result("a"))
    assert (turn.reuse, turn.differing_field) == ("none", "content")
    assert "not ok; new plan" in turn.new_text


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([calls("a", "b"), result("b"), result("a")], id="as tools ended"),
        pytest.param([calls("a"), result("a"), calls("b"), result("b")], id="one by one"),
        pytest.param([calls("b"), result("b"), calls("a"), result("a")], id="last first"),
    ],
)
def test_results_of_parallel_calls_are_read_in_order_of_the_calls(history: list[Message]) -> None:
    tree = play(([ASKED], calls("a", "b")))
    turn = go_on(tree, ASKED, *history)
    assert (turn.reuse, turn.new_messages) == ("reused", [result("a"), result("b")])
    assert turn.new_text.index("of a") < turn.new_text.index("of b")


def test_results_are_put_in_order_in_a_history_that_is_not_ours() -> None:
    foreign = [calls("x", "y"), result("y"), result("x"), calls("x"), result("x", "again")]
    assert align_tool_turns(foreign, {}) == [
        *[foreign[0], result("x"), result("y"), calls("x"), result("x", "again")]
    ]
    without_ids = [calls("x", "y"), result(None, "first"), result(None, "second")]
    assert align_tool_turns(without_ids, {}) == without_ids


def test_reasoning_that_a_client_puts_into_the_text_makes_no_difference() -> None:
    reply = normalize_chat_message(
        {"role": "assistant", "content": "7", "reasoning_content": "3 + 4"}
    )
    tree = play(([ASKED], reply))
    inlined = normalize_chat_message(
        {"role": "assistant", "content": "<think>\n3 + 4\n</think>\n\n7"}
    )
    assert go_on(tree, ASKED, inlined, user("more")).reuse == "reused"
    other = normalize_chat_message({"role": "assistant", "content": "<think>3 + 4</think>8"})
    assert go_on(tree, ASKED, other, user("more")).differing_field == "content"


def test_equal_replies_to_one_request_are_told_apart_by_their_calls() -> None:
    tree = play(([ASKED], calls("a")))
    first = tree.last_completed
    turn = go_on(tree, ASKED)
    equal = calls("a")
    equal["tool_calls"][0]["id"] = "z"
    answer(tree, turn, ENCODER.encode(turn.new_text), equal, ENCODER.encode("other"))
    assert go_on(tree, ASKED, calls("a"), result("a")).parent == first
    assert go_on(tree, ASKED, equal, result("z")).parent == tree.last_completed


@pytest.mark.parametrize(
    ("history", "changed"),
    [
        ([calls("a", content="B"), result("a")], "content"),
        ([calls("b", content="A"), result("b")], "tool_calls"),
    ],
)
def test_what_a_client_rewrites_is_read_as_it_says(history: list[Message], changed: str) -> None:
    turn = go_on(play(([ASKED], calls("a", content="A"))), ASKED, *history)
    assert (turn.differing_field, turn.parent) == (changed, None)


@pytest.mark.parametrize(
    ("history", "found"),
    [
        ([calls("a"), result("a")], []),
        ([calls("a", "b"), result("b"), result("a")], []),
        ([calls("a", "b"), result("b")], [UNANSWERED_CALL]),
        ([calls("a"), result("a"), result("a")], [UNKNOWN_CALL]),
        ([result("c"), calls("a"), result(None, "x")], [UNANSWERED_CALL, UNKNOWN_CALL, MISSING_ID]),
    ],
)
def test_lone_results_and_calls_are_named(history: list[Message], found: list[str]) -> None:
    assert sorted(list_unpaired(history)) == sorted(found)
