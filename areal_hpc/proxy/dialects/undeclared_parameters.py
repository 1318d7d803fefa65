"""Parameters that a dialect does not declare: without effect, unless they change what is said.

Clients add fields with every release. Most are hints to a provider, and refusing them would refuse
the client; so they are left out, counted and logged, as declared hints are. What would change how
the model samples, or what its reply means, is refused by its name, and so is what looks like a
parameter that is used.
"""

import difflib
import re

import msgspec
from msgspec import inspect

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.parameters_without_effect import (
    is_ignored_param,
    list_struct_types_in_unions,
)
from areal_hpc.proxy.dialects.refused_parameters import find_refusal

_MIN_SIMILARITY_TO_REFUSE = 0.85
_INDEX_PATTERN = re.compile(r"\[\d+\]")


def drop_or_refuse_undeclared_members(
    body: bytes,
    object_type: type[msgspec.Struct],
    parent_key: str,
    unknown_params: list[str] | None,
) -> bytes:
    """A JSON object without the members that are not declared, down to declared objects in it.

    The names of what was left out are added to `unknown_params`, as `tools[].defer_loading`; where
    that is None, only what asks for nothing is left out.

    Raises:
        ProxyRequestError: 400: one of them means something, or looks like one that is used, or may
            not be left out.
    """
    return _drop_or_refuse_undeclared_within(
        body, inspect.type_info(object_type), parent_key, unknown_params
    )


def _drop_or_refuse_undeclared_within(
    raw_json: bytes, declared_type: inspect.Type, parent_key: str, unknown_params: list[str] | None
) -> bytes:
    structs = list_struct_types_in_unions(declared_type)
    if not structs or raw_json.lstrip()[:1] != b"{":
        return raw_json
    members = {field.encode_name: field for struct in structs for field in struct.fields}
    tags = {struct.tag_field for struct in structs}
    is_closed = all(struct.forbid_unknown_fields for struct in structs)
    kept: dict[str, msgspec.Raw] = {}
    for name, value in msgspec.json.decode(raw_json, type=dict[str, msgspec.Raw]).items():
        place = f"{parent_key}.{name}" if parent_key else name
        if name in members:
            kept[name] = msgspec.Raw(
                _drop_or_refuse_undeclared_within(
                    bytes(value), members[name].type, place, unknown_params
                )
            )
        elif name in tags or not is_closed:
            kept[name] = value
        elif _refuse_or_say_if_worth_counting(name, place, msgspec.json.decode(value), structs):
            if unknown_params is None:
                raise ProxyRequestError(400, f"the parameter {name!r} is not supported", key=place)
            unknown_params.append(_INDEX_PATTERN.sub("[]", place))
    return msgspec.json.encode(kept)


def _refuse_or_say_if_worth_counting(
    member_name: str, key: str, value: object, structs: list[inspect.StructType]
) -> bool:
    """Whether an undeclared member is worth counting.

    Raises:
        ProxyRequestError: 400: it would change the reply, or looks like one that is used.
    """
    problem = f"the parameter {member_name!r} is not supported"
    for struct in structs:
        refusal = find_refusal(member_name, struct.cls)
        if refusal is not None:
            if refusal.is_harmless_value(value):
                return False
            raise ProxyRequestError(
                400, f"{problem}, and would change the reply", key=key, hint=refusal.way_out
            )
    used = {
        field.encode_name
        for one in structs
        for field in one.fields
        if not is_ignored_param(field.type)
    }
    near = difflib.get_close_matches(
        member_name, sorted(used), n=1, cutoff=_MIN_SIMILARITY_TO_REFUSE
    )
    if near and value is not None:
        raise ProxyRequestError(400, f"{problem}; did you mean {near[0]!r}?", key=key)
    return value is not None
