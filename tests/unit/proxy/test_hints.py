"""Nulls are taken out of what a dialect declares, and left in what is the client's own data."""

import json
from typing import Any

import msgspec
import pytest

from areal_hpc.proxy.dialects.anthropic import MessagesRequest
from areal_hpc.proxy.dialects.chat import ChatRequest
from areal_hpc.proxy.dialects.parameters import keep_declared_members
from areal_hpc.proxy.dialects.responses import ResponsesRequest
from areal_hpc.proxy.dialects.validation import decode_request_json

SCHEMA = {"type": "object", "properties": {"x": {"default": None, "enum": [None, 1]}}}


@pytest.mark.parametrize(
    ("form", "body", "expected"),
    [
        (ChatRequest, {"a": None, "n": None, "stop": ["a"]}, {"stop": ["a"]}),
        (
            ChatRequest,
            {"tools": [{"function": {"parameters": SCHEMA, "strict": None}}]},
            {"tools": [{"function": {"parameters": SCHEMA, "strict": None}}]},
        ),
        (
            ChatRequest,
            {"response_format": {"strict": None, "json_schema": {"schema": SCHEMA, "name": None}}},
            {"response_format": {"json_schema": {"schema": SCHEMA}}},
        ),
        (
            MessagesRequest,
            {"messages": [{"content": [{"type": "text", "text": None}]}]},
            {"messages": [{"content": [{"type": "text"}]}]},
        ),
        (
            ResponsesRequest,
            {
                "tool_choice": {"name": "a", "mode": None},
                "input": [{"type": 5, "id": None}, {}],
                "tools": [None],
            },
            {"tool_choice": {"name": "a"}, "input": [{"type": 5}, {}], "tools": [None]},
        ),
        (ChatRequest, [None], [None]),
    ],
)
def test_declared_objects_that_are_not_read_as_they_are_lose_nulls(
    form: type[msgspec.Struct], body: Any, expected: Any
) -> None:
    for text in (json.dumps(body), f" \n{json.dumps(body, indent=1)} "):
        assert json.loads(keep_declared_members(text.encode(), form, "", None)) == expected


def test_the_arguments_of_a_call_keep_their_nulls_beside_an_unknown_null() -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": None}}
    body = {"messages": [{"role": "assistant", "content": [call]}], "sparkle": None}
    request = decode_request_json(json.dumps(body).encode(), MessagesRequest)
    assert msgspec.to_builtins(request.messages[0])["content"] == [call]
