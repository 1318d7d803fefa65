"""Parameters that are accepted without effect, and null, which stands for absence.

Clients add hints with every release: how hard to think, what to cache, which tier to bill. A hint
changes neither how the model samples nor what is said, so it is accepted whatever its value, and
counted. A dialect declares each as a field of type `IgnoredParam`. Such fields in messages and
items are what SDKs hand back of a reply; they are not counted.
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, inspect

IgnoredParam = Annotated[Any, Meta(description="Accepted without effect.", extra={"hint": True})]
"""Any value, and None when it is not given."""
_type_info = cache(inspect.type_info)


def list_ignored_params(request: Struct, prefix: str = "") -> Iterator[str]:
    """Names of the hints in a request, or in the object within it that stands under `prefix`."""
    for name, encode_name, is_hint in _list_ignored_or_struct_fields(type(request)):
        value = getattr(request, name)
        if value is None:
            continue
        if isinstance(value, Struct):
            yield from list_ignored_params(value, f"{prefix}{encode_name}.")
        elif is_hint:
            yield prefix + encode_name


@cache
def _list_ignored_or_struct_fields(struct_type: type[Struct]) -> list[tuple[str, str, bool]]:
    """Of each field that is a hint, or may be an object with hints: both names, whether a hint."""
    declared = inspect.type_info(struct_type)
    assert isinstance(declared, inspect.StructType)
    fields = [(one, is_ignored_param(one.type)) for one in declared.fields]
    return [
        (one.name, one.encode_name, is_hint)
        for one, is_hint in fields
        if is_hint or list_struct_types_in_unions(one.type)
    ]


def is_ignored_param(field_type: inspect.Type) -> bool:
    """True for the type of a field that is an `IgnoredParam`."""
    return isinstance(field_type, inspect.Metadata) and bool((field_type.extra or {}).get("hint"))


def list_struct_types_in_unions(*types: inspect.Type) -> list[inspect.StructType]:
    """The objects that a value of these types may be."""
    return [one for one in _unwrap_types(types) if isinstance(one, inspect.StructType)]


def list_element_types_in_unions(*types: inspect.Type) -> tuple[inspect.Type, ...]:
    """Types of the items of lists that a value of these types may be."""
    return tuple(one.item_type for one in _unwrap_types(types) if isinstance(one, inspect.ListType))


def drop_null_params(body: bytes, request_type: Any) -> bytes:
    """A request without the members that are null, down to where a client's own data begins.

    SDKs write null for what they do not ask for, whether or not the server knows the name. Schemas
    and the arguments of tools are data: null means something there.
    """
    return _drop_null_members(body.lstrip(), (_type_info(request_type),))


def _drop_null_members(raw_json: bytes, declared_types: tuple[inspect.Type, ...]) -> bytes:
    structs, items = (
        list_struct_types_in_unions(*declared_types),
        list_element_types_in_unions(*declared_types),
    )
    if structs and raw_json[:1] == b"{":
        members: dict[str, tuple[inspect.Type, ...]] = {}
        for struct in structs:
            for field in struct.fields:
                members[field.encode_name] = (*members.get(field.encode_name, ()), field.type)
        found = msgspec.json.decode(raw_json, type=dict[str, msgspec.Raw])
        kept = {
            name: msgspec.Raw(_drop_null_members(bytes(value), members.get(name, ())))
            for name, value in found.items()
            if bytes(value) != b"null"
        }
        return msgspec.json.encode(kept)
    if items and raw_json[:1] == b"[":
        listed = msgspec.json.decode(raw_json, type=list[msgspec.Raw])
        return msgspec.json.encode(
            [msgspec.Raw(_drop_null_members(bytes(r), items)) for r in listed]
        )
    return raw_json


def _unwrap_types(types: tuple[inspect.Type, ...]) -> Iterator[inspect.Type]:
    """The types that a value may have, out of unions and constraints."""
    for form in types:
        if isinstance(form, inspect.Metadata):
            yield from _unwrap_types((form.type,))
        elif isinstance(form, inspect.UnionType):
            yield from _unwrap_types(form.types)
        else:
            yield form
