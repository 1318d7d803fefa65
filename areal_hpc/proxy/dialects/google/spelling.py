"""Names of parameters in camel case, as a request is declared.

Google reads each name in camel and in snake case, and its SDKs mix them within one request.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.declared_objects import (
    Members,
    get_type_info,
    list_item_types,
    list_struct_types,
    rewrite_declared_objects,
)


def spell_in_camel_case(body: bytes | msgspec.Raw, request_type: Any) -> bytes:
    """A JSON request whose declared names are all in camel case; a client's own data is left alone.

    What is not JSON comes back as it is.
    """
    body = bytes(body)
    if _build_snake_pattern(request_type).search(body) is None:
        return body
    try:
        return rewrite_declared_objects(
            body, request_type, "", _rename_to_camel_case, skips_sound=False
        )
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body


@cache
def _build_snake_pattern(request_type: Any) -> re.Pattern[bytes]:
    names = "|".join(sorted(_list_snake_names((get_type_info(request_type),))))
    return re.compile(rf'"(?:{names})"\s*:'.encode())


def _list_snake_names(declared_types: Sequence[inspect.Type]) -> set[str]:
    structs, items = list_struct_types(*declared_types), list_item_types(*declared_types)
    fields = [field for one in structs for field in one.fields]
    names = {field.name for field in fields if field.name != field.encode_name}
    below = [items, *((field.type,) for field in fields)]
    return names.union(*(_list_snake_names(one) for one in below if one))


def _rename_to_camel_case(members: Members, structs: list[inspect.StructType], key: str) -> Members:
    in_camel_case = {field.name: field.encode_name for one in structs for field in one.fields}
    renamed: Members = {}
    for given, value in members.items():
        name = in_camel_case.get(given, given)
        if name in renamed:
            problem = f"{name} is given twice, in two spellings"
            raise ProxyRequestError(400, problem, key=f"{key}.{name}" if key else name)
        renamed[name] = value
    return renamed
