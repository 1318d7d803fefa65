"""Objects in a JSON request that a dialect declares, down to where a client's own data begins.

Schemas and the arguments of tools are data: nothing in them is looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from areal_hpc.errors import ProxyRequestError

MAX_REWRITTEN_OBJECTS = 12_500
"""In one request. Each takes the loop about 12 microseconds; an item of a list half of that."""
Members = dict[str, msgspec.Raw]
RewriteMembers = Callable[[Members, list[inspect.StructType], str], Members]
get_type_info = cache(inspect.type_info)


def rewrite_declared_objects(
    raw_json: bytes, request_type: Any, key: str, rewrite: RewriteMembers, *, skips_sound: bool
) -> bytes:
    """A JSON request, or the part of one under `key`, each of whose declared objects is rewritten.

    With `skips_sound` one that can be read as it is stays so, and all within it.
    """
    types = (get_type_info(request_type),)
    return _Rewriter(rewrite, skips_sound).rewrite_value(raw_json, types, key)


class _Rewriter:
    def __init__(self, rewrite_members: RewriteMembers, skips_sound: bool) -> None:
        self._rewrite_members = rewrite_members
        self._skips_sound = skips_sound
        self._objects_left = float(MAX_REWRITTEN_OBJECTS)

    def rewrite_value(
        self, raw_json: bytes, declared_types: Sequence[inspect.Type], key: str
    ) -> bytes:
        structs, items = list_struct_types(*declared_types), list_item_types(*declared_types)
        raw_json = raw_json.lstrip()
        if structs and raw_json[:1] == b"{":
            self._count(1, key)
            types: dict[str, list[inspect.Type]] = {}
            for field in (field for one in structs for field in one.fields):
                types.setdefault(field.encode_name, []).append(field.type)
            members = msgspec.json.decode(raw_json, type=Members)
            members = self._rewrite_members(members, structs, key)
            for name, value in members.items():
                if name in types:
                    below = f"{key}.{name}" if key else name
                    members[name] = self._rewrite_within(value, types[name], below)
            return msgspec.json.encode(members)
        if items and raw_json[:1] == b"[":
            listed = msgspec.json.decode(raw_json, type=list[msgspec.Raw])
            self._count(len(listed) / 2, key)
            return msgspec.json.encode(
                [self._rewrite_within(one, items, f"{key}[{i}]") for i, one in enumerate(listed)]
            )
        return raw_json

    def _count(self, objects: float, key: str) -> None:
        self._objects_left -= objects
        if self._objects_left < 0:
            problem = f"more than {MAX_REWRITTEN_OBJECTS} objects are not as this API has them"
            raise ProxyRequestError(400, problem, key=key)

    def _rewrite_within(
        self, value: msgspec.Raw, declared_types: Sequence[inspect.Type], key: str
    ) -> msgspec.Raw:
        structs = list_struct_types(*declared_types) if self._skips_sound else ()
        if any(_can_be_read(value, one.cls) for one in structs):
            return value
        return msgspec.Raw(self.rewrite_value(bytes(value), declared_types, key))


def _can_be_read(raw_json: msgspec.Raw, struct: type[msgspec.Struct]) -> bool:
    try:
        msgspec.json.decode(raw_json, type=struct)
    except msgspec.ValidationError:
        return False
    return True


def list_struct_types(*types: inspect.Type) -> list[inspect.StructType]:
    return [one for one in _unwrap_types(types) if isinstance(one, inspect.StructType)]


def list_item_types(*types: inspect.Type) -> list[inspect.Type]:
    return [one.item_type for one in _unwrap_types(types) if isinstance(one, inspect.ListType)]


def _unwrap_types(types: Sequence[inspect.Type]) -> Iterator[inspect.Type]:
    for form in types:
        if isinstance(form, inspect.Metadata):
            yield from _unwrap_types((form.type,))
        elif isinstance(form, inspect.UnionType):
            yield from _unwrap_types(form.types)
        else:
            yield form
