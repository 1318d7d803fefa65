"""Objects in a JSON request that a dialect declares, down to where a client's own data begins.

Schemas and the arguments of tools are data: nothing in them is looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

Members = dict[str, msgspec.Raw]
RewriteMembers = Callable[[Members, list[inspect.StructType], str], Members]
"""The members of an object as they shall be, from what it has, may be, and stands under."""
get_type_info = cache(inspect.type_info)


def rewrite_declared_objects(
    raw_json: bytes, request_type: Any, key: str, rewrite: RewriteMembers
) -> bytes:
    """A JSON request, or the part of one under `key`, each of whose declared objects is rewritten.

    Raises:
        msgspec.DecodeError: It is not JSON.
    """
    return _rewrite(raw_json, (get_type_info(request_type),), key, rewrite)


def _rewrite(
    raw_json: bytes, declared_types: Sequence[inspect.Type], key: str, rewrite: RewriteMembers
) -> bytes:
    structs, items = list_struct_types(*declared_types), list_item_types(*declared_types)
    raw_json = raw_json.lstrip()
    if structs and raw_json[:1] == b"{":
        types: dict[str, list[inspect.Type]] = {}
        for field in (field for one in structs for field in one.fields):
            types.setdefault(field.encode_name, []).append(field.type)
        members = rewrite(msgspec.json.decode(raw_json, type=Members), structs, key)
        for name, value in members.items():
            below = f"{key}.{name}" if key else name
            members[name] = msgspec.Raw(_rewrite(bytes(value), types.get(name, ()), below, rewrite))
        return msgspec.json.encode(members)
    if items and raw_json[:1] == b"[":
        listed = enumerate(msgspec.json.decode(raw_json, type=list[msgspec.Raw]))
        return msgspec.json.encode(
            [msgspec.Raw(_rewrite(bytes(one), items, f"{key}[{i}]", rewrite)) for i, one in listed]
        )
    return raw_json


def list_struct_types(*types: inspect.Type) -> list[inspect.StructType]:
    """The objects that a value of these types, or of their unions, may be."""
    return [one for one in _unwrap_types(types) if isinstance(one, inspect.StructType)]


def list_item_types(*types: inspect.Type) -> list[inspect.Type]:
    """Types of the items of lists that a value of these types, or of their unions, may be."""
    return [one.item_type for one in _unwrap_types(types) if isinstance(one, inspect.ListType)]


def _unwrap_types(types: Sequence[inspect.Type]) -> Iterator[inspect.Type]:
    """The types that a value may have, out of unions and constraints."""
    for form in types:
        if isinstance(form, inspect.Metadata):
            yield from _unwrap_types((form.type,))
        elif isinstance(form, inspect.UnionType):
            yield from _unwrap_types(form.types)
        else:
            yield form
