"""Names that are declared are spelled in camel case; a client's own data is left alone."""

import json
from typing import Any

import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.google.request import CountTokensRequest, GenerateContentRequest
from areal_hpc.proxy.dialects.google.spelling import spell_in_camel_case

CALL = {"name": "f", "args": {"function_call": {"top_p": None}}}
SCHEMA: dict[str, Any] = {"properties": {"system_instruction": {"any_of": []}}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tool_config": None}, {"toolConfig": None}),
        (
            {"contents": {"parts": {"function_call": CALL}}},
            {"contents": {"parts": {"functionCall": CALL}}},
        ),
        (
            {"contents": [{"parts": [{"text": "a"}, {"function_call": CALL}]}]},
            {"contents": [{"parts": [{"text": "a"}, {"functionCall": CALL}]}]},
        ),
        (
            {"generation_config": {"response_schema": SCHEMA, "my_own": 1}},
            {"generationConfig": {"responseSchema": SCHEMA, "my_own": 1}},
        ),
        ({"tools": [{"function_declarations": []}]}, {"tools": [{"function_declarations": []}]}),
        ({"system_instruction": 7}, {"systemInstruction": 7}),
    ],
)
def test_declared_names(body: Any, expected: Any) -> None:
    for text in (json.dumps(body), f" \n{json.dumps(body, indent=1)} "):
        assert json.loads(spell_in_camel_case(text.encode(), GenerateContentRequest)) == expected
    whole = json.dumps({"generate_content_request": body}).encode()
    respelled = json.loads(spell_in_camel_case(whole, CountTokensRequest))
    assert respelled == {"generateContentRequest": expected}


@pytest.mark.parametrize(
    "body",
    [
        b'{"contents": [{"parts": [{"text": "say \\"top_p\\": 1"}]}]}',
        b'{"contents": [], "x": {"y_z": 1}}',
        b'{"top_p": ',
    ],
)
def test_what_has_nothing_to_spell_comes_back_as_it_is(body: bytes) -> None:
    assert spell_in_camel_case(body, GenerateContentRequest) == body


def test_two_spellings_of_one_name_are_refused() -> None:
    body = b'{"contents": [], "generation_config": {"top_p": 1, "topP": 1}}'
    with pytest.raises(ProxyRequestError) as caught:
        spell_in_camel_case(body, GenerateContentRequest)
    assert caught.value.param == "generationConfig.topP"
