"""Spliced prompts equal the tokens that the model saw, in every template family and history."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.session.open_turn import build_open_turn
from areal_hpc.session.tree import Interaction, InteractionTree, unpack_ids
from tests.support.prompt_audit import prompt_ids, rendered_ids
from tests.unit.session.families import ENCODER, FAMILIES, Family
from tests.unit.session.model_stub import answer, turn, user

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\u241f"),
    max_size=12,
).filter(lambda text: "<" not in text)
arguments = st.dictionaries(st.sampled_from("xyz"), st.integers(-9, 9) | texts, max_size=2)


@dataclass(frozen=True)
class Reply:
    """Reply of a model in one turn."""

    text: str
    reasoning: str = ""
    call: dict[str, Any] | None = None
    own_split: bool = False
    """Tokens of single letters in the model's output, unlike the tokenizer's."""
    closed: bool = True


replies = st.builds(
    Reply, texts, texts | st.just(""), st.none() | arguments, st.booleans(), st.booleans()
)
turns = st.lists(st.tuples(texts, replies), min_size=1, max_size=4)


def written(family: Family, reply: Reply) -> str:
    """Write the reply as the model does."""
    parts = reply.text
    if reply.reasoning and family.keeps_reasoning:
        parts = f"<think>\n{reply.reasoning}\n</think>\n\n{parts}"
    if reply.call is not None:
        call = family.calls.format(name="add", arguments=json.dumps(reply.call, ensure_ascii=False))
        parts += ("\n" if reply.text else "") + call
    return parts


def message(family: Family, reply: Reply, number: int) -> dict[str, Any]:
    """Build the message of the reply as the proxy returns it."""
    fields: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning and family.keeps_reasoning:
        fields["reasoning_content"] = reply.reasoning
    if reply.call is not None:
        function = {"name": "add", "arguments": json.dumps(reply.call)}
        fields["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": function}]
    return fields


def as_an_sdk_sends_it(fields: dict[str, Any]) -> Message:
    """Change spacing, order of arguments and ids; drop reasoning; set null where it is empty."""
    sent = {**fields, "content": fields["content"] or None, "refusal": None}
    sent.pop("reasoning_content", None)
    if "tool_calls" in sent:
        function = sent["tool_calls"][0]["function"]
        pairs = list(json.loads(function["arguments"]).items())[::-1]
        respelled = json.dumps(dict(pairs), indent=1)
        sent["tool_calls"] = [
            {"id": "other", "function": {"name": function["name"], "arguments": respelled}}
        ]
    return normalize_chat_message(sent)


def speak(
    tree: InteractionTree, family: Family, messages: list[Message], reply: Reply
) -> Interaction:
    turn = build_open_turn(tree, messages, family.template, ENCODER, tools=TOOLS)
    new_ids = turn.drop_repeated_turn_end(ENCODER.encode(turn.new_text))
    text = written(family, reply)
    pieces = list(text) if reply.own_split else [text]
    output = [i for piece in pieces for i in ENCODER.encode(piece)]
    if reply.closed:
        output += ENCODER.encode(family.end_of_turn)
    normalized = normalize_chat_message(message(family, reply, len(tree)))
    return answer(tree, turn, new_ids, normalized, output, closed=reply.closed)


def converse(family: Family, conversation: list[tuple[str, Reply]]) -> InteractionTree:
    """Play a conversation; each prompt must begin with all that the model read and wrote before."""
    tree = InteractionTree()
    messages: list[Message] = []
    read: list[int] = []
    for question, reply in conversation:
        asks_back = bool(messages) and "tool_calls" in messages[-1]
        role = {"role": "tool", "tool_call_id": "other"} if asks_back else {"role": "user"}
        messages.append(normalize_chat_message({**role, "content": question}))
        interaction = speak(tree, family, messages, reply)
        prompt = prompt_ids(tree, interaction)
        assert prompt[: len(read)] == read
        read = prompt + unpack_ids(interaction.output_ids).tolist()
        fields = message(family, reply, len(tree) - 1)
        messages.append(as_an_sdk_sends_it(fields))
    return tree


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@given(conversation=turns)
def test_a_prompt_begins_with_all_that_was_read_and_said_and_ends_as_the_template_writes(
    family: Family, conversation: list[tuple[str, Reply]]
) -> None:
    tree = converse(family, conversation)
    assert [node.reuse for node in tree] == ["none"] + ["reused"] * (len(conversation) - 1)
    for node in [] if family.name == "undelimited" else [*tree][1:]:
        new = ENCODER.decode(unpack_ids(node.new_ids).tolist())
        rendering = ENCODER.decode(rendered_ids(tree, node, family.template, ENCODER))
        is_closed = tree[node.parent_id or ""].closed
        assert rendering.endswith(new if is_closed else new.removeprefix(family.end_of_turn))


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
@given(conversation=turns)
def test_replies_written_as_the_template_writes_them_leave_no_difference(
    family: Family, conversation: list[tuple[str, Reply]]
) -> None:
    plain = []
    for question, reply in conversation:
        text = reply.text.strip()
        plain.append((question, Reply(text, call=None if text else reply.call)))
    tree = converse(family, plain)
    for node in tree:
        assert prompt_ids(tree, node) == rendered_ids(tree, node, family.template, ENCODER)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"content": "8"}, "content"),
    ({"reasoning_content": "because"}, "reasoning_content"),
    ({"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}, "tool_calls"),
    ({"role": "user"}, "role"),
]


@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_a_rewritten_reply_forks_and_says_in_what(change: dict[str, Any], why: str) -> None:
    family, reply = FAMILIES[1], Reply("7", "why")
    tree = converse(family, [("a", reply)])
    changed = normalize_chat_message({**message(family, reply, 0), **change})
    history = [user("a"), changed, user("b"), *turn("c", "d")]
    opened = build_open_turn(tree, history, family.template, ENCODER, tools=TOOLS)
    assert (opened.parent, opened.reuse, opened.differing_field) == (None, "none", why)


@pytest.mark.parametrize(
    ("history", "tools", "reuse", "why"),
    [
        ([user("a"), *turn("7", "c")], TOOLS, "reused", None),
        ([user("other")], TOOLS, "none", None),
        ([user("a"), user("7")], TOOLS, "none", None),
        ([user("a"), *turn("7"), *turn("7", "d")], TOOLS, "reused", None),
        ([user("A"), *turn("7")], TOOLS, "none", "content"),
        ([user("a"), *turn("7", "c"), *turn("7", "d")], TOOLS, "reused", "content"),
        ([user("a"), *turn("7")], None, "none", "tools"),
    ],
)
def test_a_rewritten_question_and_other_tools_fork_too_but_a_new_branch_does_not(
    history: list[Message], tools: Any, reuse: str, why: str | None
) -> None:
    tree = converse(FAMILIES[0], [("a", Reply("7")), ("b", Reply("7"))])
    opened = build_open_turn(tree, history, FAMILIES[0].template, ENCODER, tools=tools)
    assert (opened.reuse, opened.differing_field) == (reuse, why)
