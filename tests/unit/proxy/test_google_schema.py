"""Google's schemas become JSON schemas; JSON schemas stay what they are."""

from typing import Any

import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.google_schema import convert_to_json_schema

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
        # What a client calls its own things is not touched.
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
