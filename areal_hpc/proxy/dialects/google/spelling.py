"""Names of parameters in camel case, as a request is declared.

Google reads each name in camel and in snake case, and its SDKs mix them within one request.
"""

import re
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.parameters_without_effect import (
    list_element_types_in_unions,
    list_struct_types_in_unions,
)


def spell_in_camel_case(body: bytes | msgspec.Raw, request_type: Any) -> bytes:
    """A JSON request whose declared names are all in camel case; a client's own data is left alone.

    What is not JSON comes back as it is.

    Raises:
        ProxyRequestError: 400, one parameter stands there in both spellings.
    """
    body = bytes(body)
    if _build_snake_pattern(request_type).search(body) is None:
        return body
    try:
        return _rename_keys_to_camel_case(body, (_get_type_info(request_type),), "")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body


_get_type_info = cache(inspect.type_info)


@cache
def _build_snake_pattern(request_type: Any) -> re.Pattern[bytes]:
    """Finds a declared name in snake case, where a name may stand."""
    names = "|".join(sorted(_list_snake_names((_get_type_info(request_type),))))
    return re.compile(rf'"(?:{names})"\s*:'.encode())


def _list_snake_names(declared_types: tuple[inspect.Type, ...]) -> set[str]:
    structs, items = (
        list_struct_types_in_unions(*declared_types),
        list_element_types_in_unions(*declared_types),
    )
    names = {
        field.name for one in structs for field in one.fields if field.name != field.encode_name
    }
    below = [(field.type,) for one in structs for field in one.fields]
    return names.union(*map(_list_snake_names, [items, *below] if items else below))


def _rename_keys_to_camel_case(
    raw_json: bytes, declared_types: tuple[inspect.Type, ...], parent_key: str
) -> bytes:
    structs, items = (
        list_struct_types_in_unions(*declared_types),
        list_element_types_in_unions(*declared_types),
    )
    raw_json = raw_json.lstrip()
    if structs and raw_json[:1] == b"{":
        fields = [field for one in structs for field in one.fields]
        in_camel_case = {field.name: field.encode_name for field in fields}
        types = {field.encode_name: field.type for field in fields}
        kept: dict[str, msgspec.Raw] = {}
        for given, value in msgspec.json.decode(raw_json, type=dict[str, msgspec.Raw]).items():
            name = in_camel_case.get(given, given)
            where = f"{parent_key}.{name}" if parent_key else name
            if name in kept:
                problem = f"{name} is given twice, in two spellings"
                raise ProxyRequestError(400, problem, key=where)
            below = (types[name],) if name in types else ()
            kept[name] = msgspec.Raw(_rename_keys_to_camel_case(bytes(value), below, where))
        return msgspec.json.encode(kept)
    if items and raw_json[:1] == b"[":
        listed = msgspec.json.decode(raw_json, type=list[msgspec.Raw])
        return msgspec.json.encode(
            [
                msgspec.Raw(_rename_keys_to_camel_case(bytes(one), items, f"{parent_key}[{i}]"))
                for i, one in enumerate(listed)
            ]
        )
    return raw_json
