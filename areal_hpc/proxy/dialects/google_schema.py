"""Conversion of Google's schemas to JSON schemas.

Google's schemas have types in upper case, `nullable`, and names in camel or snake case. A JSON
schema stays unchanged, but for types in upper case, which clients write there too.
"""

import re
from typing import Any

from areal_hpc.errors import ProxyRequestError

MAX_SCHEMA_DEPTH = 64
_JSON_SCHEMA_TYPES = frozenset(
    {"object", "array", "string", "number", "integer", "boolean", "null"}
)
_CAMEL_CASE_BY_SNAKE: dict[str, str] = {
    "any_of": "anyOf",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "property_ordering": "propertyOrdering",
    "additional_properties": "additionalProperties",
}
_COUNT_KEYS = frozenset(
    name for name in _CAMEL_CASE_BY_SNAKE.values() if name[:3] in ("min", "max")
)
"""Keys of 64-bit integers, which Google's JSON writes as texts."""
_COUNT_PATTERN = re.compile(r"[0-9]{1,19}")
_SUBSCHEMA_KEYS = frozenset(
    {"items", "additionalProperties", "not", "contains", "if", "then", "else"}
)
_SUBSCHEMA_LIST_KEYS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SUBSCHEMA_MAP_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def convert_to_json_schema(schema: Any, key: str, depth: int = 0) -> Any:
    if not isinstance(schema, dict):  # true and false are schemas
        return schema
    if depth > MAX_SCHEMA_DEPTH:
        raise ProxyRequestError(400, f"schemas nest deeper than {MAX_SCHEMA_DEPTH}", key=key)

    def convert(subschema: Any) -> Any:
        return convert_to_json_schema(subschema, key, depth + 1)

    converted: dict[str, Any] = {}
    original: str
    for original, value in schema.items():
        name = _CAMEL_CASE_BY_SNAKE.get(original, original)
        if name in _SUBSCHEMA_KEYS:
            value = [*map(convert, value)] if isinstance(value, list) else convert(value)
        elif name in _SUBSCHEMA_LIST_KEYS and isinstance(value, list):
            value = [*map(convert, value)]
        elif name in _SUBSCHEMA_MAP_KEYS and isinstance(value, dict):
            value = {member: convert(subschema) for member, subschema in value.items()}
        elif name in _COUNT_KEYS and isinstance(value, str) and _COUNT_PATTERN.fullmatch(value):
            value = int(value)
        elif name == "type":
            value = (
                [*map(_lower_type_name, value)]
                if isinstance(value, list)
                else _lower_type_name(value)
            )
        converted[name] = value
    return _replace_google_keys(converted)


def _lower_type_name(kind: Any) -> Any:
    lower = kind.lower() if isinstance(kind, str) else ""
    return lower if lower in _JSON_SCHEMA_TYPES else kind


def _replace_google_keys(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") == "TYPE_UNSPECIFIED":
        del schema["type"]
    if schema.get("format") == "enum":
        del schema["format"]
    ordering, properties = schema.pop("propertyOrdering", None), schema.get("properties")
    if isinstance(ordering, list) and isinstance(properties, dict):
        names = (item for item in ordering if isinstance(item, str))
        first = {name: properties[name] for name in names if name in properties}
        schema["properties"] = {**first, **properties}
    if schema.pop("nullable", None) is not True:
        return schema
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return schema
