"""Parameters of requests: nulls, efforts, schemas, grammars without end, names to count."""

import json
import logging
from typing import Any

import msgspec
import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.anthropic import MessagesRequest
from areal_hpc.proxy.dialects.chat import ChatRequest
from areal_hpc.proxy.dialects.google_schema import convert_to_json_schema
from areal_hpc.proxy.dialects.parameters import keep_declared_members
from areal_hpc.proxy.dialects.responses import ResponsesRequest
from areal_hpc.proxy.dialects.validation import build_reasoning_variables, decode_request_json
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.limits import MAX_CHARS_BY_KIND, refuse_costly_sampling
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.metrics import MAX_LOGGED_KINDS, ProxyMetrics
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from tests.support.chatml import CHATML, REASONING_CHATML, byte_level_tokenizer

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
def test_declared_objects_lose_nulls(form: type[msgspec.Struct], body: Any, expected: Any) -> None:
    for text in (json.dumps(body), f" \n{json.dumps(body, indent=1)} "):
        assert json.loads(keep_declared_members(text.encode(), form, "", None)) == expected


def test_the_arguments_of_a_call_keep_their_nulls_beside_an_unknown_null() -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": None}}
    body = {"messages": [{"role": "assistant", "content": [call]}], "sparkle": None}
    request = decode_request_json(json.dumps(body).encode(), MessagesRequest)
    assert msgspec.to_builtins(request.messages[0])["content"] == [call]


GPT_OSS = "{{ reasoning_effort }}" + CHATML
BOTH = "{{ reasoning_effort }}" + REASONING_CHATML
DEEPSEEK = "{% if thinking is defined and thinking %}<think>{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("template", "wish", "variables"),
    [
        (CHATML, {"effort": "high"}, {}),
        (CHATML, {"thinks": False}, {}),
        (CHATML, {}, {}),
        (REASONING_CHATML, {"effort": "none"}, {"enable_thinking": False}),
        (REASONING_CHATML, {"effort": "minimal"}, {"enable_thinking": True}),
        (REASONING_CHATML, {"thinks": True}, {"enable_thinking": True}),
        (REASONING_CHATML, {"effort": {"odd": 1}}, {}),
        (DEEPSEEK, {"thinks": False}, {"thinking": False}),
        (GPT_OSS, {"effort": "medium"}, {"reasoning_effort": "medium"}),
        (GPT_OSS, {"effort": "xhigh"}, {"reasoning_effort": "high"}),
        (GPT_OSS, {"effort": "none"}, {}),
        (GPT_OSS, {"effort": "sparkling"}, {}),
        (GPT_OSS, {"thinks": True}, {}),
        (BOTH, {"effort": "max"}, {"enable_thinking": True, "reasoning_effort": "high"}),
        (BOTH, {"effort": "none"}, {"enable_thinking": False}),
    ],
)
def test_what_the_template_reads_is_set_and_the_rest_is_named(
    template: str, wish: dict[str, Any], variables: dict[str, Any]
) -> None:
    tokenizer = byte_level_tokenizer()
    model = ServedModel("m", ChatTemplate(template), TokenEncoder(tokenizer), 100)
    ignored: list[str] = []
    assert build_reasoning_variables(model, "wish", ignored, **wish) == variables
    assert ignored == (["wish"] if wish and not variables else [])


@pytest.mark.parametrize("kind", MAX_CHARS_BY_KIND)
def test_long_grammars_are_refused(kind: str) -> None:
    grammar: dict[str, Any] = {kind: "a" * MAX_CHARS_BY_KIND[kind]}
    refuse_costly_sampling(SamplingParams(1.0, 16, **grammar))
    with pytest.raises(ProxyRequestError, match="characters") as refused:
        refuse_costly_sampling(SamplingParams(1.0, 16, **{kind: grammar[kind] + "a"}))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stop", ["a"] * 129),
        ("stop", ["a" * 1025]),
        ("stop_token_ids", [5] * 1025),
        ("logit_bias", {str(token): 1.0 for token in range(16_385)}),
    ],
)
def test_lists_without_end_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ProxyRequestError, match=f"{key} is too large") as refused:
        refuse_costly_sampling(SamplingParams(1.0, 16, **{key: value}))
    assert refused.value.param == key


def test_parameters_beyond_the_bound_share_a_counter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = ProxyMetrics()
    names = [f"hint{i}" for i in range(MAX_LOGGED_KINDS)]
    metrics.count_ignored_parameters("/messages", "client", [*names, "more", "much", "hint0"])
    lines = metrics.render().decode().splitlines()
    counted = [
        line for line in lines if line.startswith("areal_hpc_proxy_ignored_parameters_total")
    ]
    assert len(counted) == MAX_LOGGED_KINDS + 1
    label = 'areal_hpc_proxy_ignored_parameters_total{parameter="%s",route="/messages"} 2.0'
    assert {label % "others", label % "hint0"} <= {*counted}
    assert len(caplog.messages) == MAX_LOGGED_KINDS
    metrics.count_ignored_parameters("/messages", "another", ["hint0"])
    assert len(caplog.messages) == MAX_LOGGED_KINDS


MAP = {"type": "object", "properties": {"type": {"type": "string"}, "any_of": {}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "STRING"}, {"type": "string"}),
        ({"type": ["STRING", "NULL"]}, {"type": ["string", "null"]}),
        ({"type": "TYPE_UNSPECIFIED", "title": "A"}, {"title": "A"}),
        ({"type": "STRING", "format": "enum", "enum": ["A"]}, {"type": "string", "enum": ["A"]}),
        ({"type": "STRING", "format": "date-time"}, {"type": "string", "format": "date-time"}),
        ({"type": "INTEGER", "nullable": True}, {"type": ["integer", "null"]}),
        ({"type": "INTEGER", "nullable": False}, {"type": "integer"}),
        (
            {"type": "STRING", "nullable": True, "enum": ["A"]},
            {"type": ["string", "null"], "enum": ["A", None]},
        ),
        (
            {"any_of": [{"type": "STRING"}], "nullable": True},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
        (
            {"type": "ARRAY", "min_items": "1", "maxItems": 3, "items": {"type": "NUMBER"}},
            {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "number"}},
        ),
        ({"minItems": "9" * 5000}, {"minItems": "9" * 5000}),
        ({"$defs": {"A": {"type": "OBJECT"}}}, {"$defs": {"A": {"type": "object"}}}),
        ({"items": [{"type": "OBJECT"}, True]}, {"items": [{"type": "object"}, True]}),
        # Names that a client gives its own things are not touched.
        (MAP, MAP),
        ({"type": "STRING", "default": {"type": "STRING"}}, {"type": "string"}),
        ({"const": "STRING", "enum": ["OBJECT"]}, {"const": "STRING", "enum": ["OBJECT"]}),
        (True, True),
        (None, None),
    ],
)
def test_a_schema(given: Any, expected: Any) -> None:
    built = convert_to_json_schema(given, "k")
    if isinstance(built, dict) and "default" in built:
        assert built.pop("default") == given["default"]
    assert built == expected


def test_properties_come_in_the_order_that_is_asked_for() -> None:
    given = {"properties": {"a": {}, "b": {}, "c": {}}, "property_ordering": ["c", ["b"], "a", "x"]}
    built = convert_to_json_schema(given, "k")
    assert [*built] == ["properties"]
    assert [*built["properties"]] == ["c", "a", "b"]


def test_a_schema_without_an_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"items": schema}
    with pytest.raises(ProxyRequestError) as caught:
        convert_to_json_schema(schema, "tools[0]")
    assert caught.value.param == "tools[0]"
