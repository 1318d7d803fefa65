"""Parameters that are accepted without effect.

Clients add hints with every release: how hard to think, what to cache, which tier to bill. A hint
changes neither how the model samples nor what is said, so it is accepted whatever its value, and
counted. A dialect declares each as a field of type `IgnoredParam`. Such fields in messages and
items are what SDKs hand back of a reply; they are not counted.
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

from msgspec import Meta, Struct, inspect

from areal_hpc.proxy.dialects.declared_objects import list_struct_types

IgnoredParam = Annotated[Any, Meta(description="Accepted without effect.", extra={"hint": True})]
"""Any value, and None when it is not given."""


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
    declared = inspect.type_info(struct_type)
    assert isinstance(declared, inspect.StructType)
    fields = [(one, is_ignored_param(one.type)) for one in declared.fields]
    return [
        (one.name, one.encode_name, is_hint)
        for one, is_hint in fields
        if is_hint or list_struct_types(one.type)
    ]


def is_ignored_param(field_type: inspect.Type) -> bool:
    return isinstance(field_type, inspect.Metadata) and bool((field_type.extra or {}).get("hint"))
