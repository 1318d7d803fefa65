"""What makes no difference between two messages, and what would not be stored."""

from typing import Any

import msgspec
import pytest

from areal_hpc.session.message_matching import (
    find_differing_field,
    normalize_chat_message,
    strip_volatile_lines,
)


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
def test_a_call_of_ours_may_come_back_with_more_arguments(
    name: str, arguments: dict[str, object], is_same: bool
) -> None:
    def reply(name: str, arguments: dict[str, object]) -> dict[str, Any]:
        function = {"name": "edit", "arguments": arguments}
        call = {"type": "function", "id": name, "function": function}
        return normalize_chat_message({"role": "assistant", "tool_calls": [call]})

    differing = find_differing_field(reply("call-1", {"x": 1}), reply(name, arguments))
    assert differing == (None if is_same else "tool_calls")
