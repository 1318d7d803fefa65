"""Demonstrations are read from every form of chat data, and other rows are refused."""

import json
from typing import Any

import pytest

from areal_hpc.dataset.demonstrations import Demonstration, parse_demonstration
from areal_hpc.errors import RecipeError

ASKED = {"role": "user", "content": "1 + 1"}
REPLY = {"role": "assistant", "content": "2"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
READ_CALL = {**CALL, "function": {"name": "add", "arguments": {"x": 1}}}
TOOLS = [{"name": "add"}]


@pytest.mark.parametrize(
    ("row", "demonstration"),
    [
        ({"messages": [ASKED, REPLY]}, Demonstration([ASKED, REPLY])),
        ({"messages": [ASKED, REPLY, ASKED]}, Demonstration([ASKED, REPLY, ASKED])),
        ({"messages": [ASKED, REPLY], "tools": TOOLS}, Demonstration([ASKED, REPLY], TOOLS)),
        (
            {"messages": [ASKED, REPLY], "tools": json.dumps(TOOLS)},
            Demonstration([ASKED, REPLY], TOOLS),
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            Demonstration([ASKED, {"role": "assistant", "content": "", "tool_calls": [READ_CALL]}]),
        ),
        (
            {"prompt": [ASKED, REPLY, ASKED], "completion": [REPLY], "messages": None},
            Demonstration([ASKED, REPLY, ASKED, REPLY], first_learned=3),
        ),
        ({"prompt": "1 + 1 =", "completion": " 2"}, Demonstration(plain_text=("1 + 1 =", " 2"))),
    ],
)
def test_rows_are_read(row: dict[str, Any], demonstration: Demonstration) -> None:
    assert parse_demonstration(row) == demonstration


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "KeyError('prompt')"),
        ({"messages": []}, "got messages of the roles none"),
        ({"messages": "text"}, "AttributeError"),
        ({"messages": [ASKED]}, "got messages of the roles user"),
        ({"messages": [{"content": "2"}]}, "KeyError('role')"),
        ({"messages": [ASKED, REPLY], "tools": {"name": "add"}}, "`tools` is a dict"),
        ({"messages": [ASKED, REPLY], "tools": "add"}, "JSONDecodeError"),
        ({"prompt": [ASKED, REPLY], "completion": []}, "got messages of the roles none"),
        ({"prompt": [ASKED], "completion": "2"}, "AttributeError"),
    ],
)
def test_another_row_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match="a demonstration has `messages`") as raised:
        parse_demonstration(row, "demos.jsonl:2")
    (problem,) = raised.value.problems
    assert message in problem.message
    assert problem.key == "demos.jsonl:2"


def test_a_tokenizer_learns_from_texts_and_arguments() -> None:
    called = {"messages": [ASKED, {"role": "assistant", "content": "Hm", "tool_calls": [CALL]}]}
    assert [*parse_demonstration(called).list_texts()] == ["1 + 1", "Hm", '{"x":1}']
    plain = parse_demonstration({"prompt": "a", "completion": "b"})
    assert [*plain.list_texts()] == ["a", "b"]
