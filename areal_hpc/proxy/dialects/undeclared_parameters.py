"""Parameters that are null, or not declared: without effect, unless they change what is said.

Clients add fields with every release. Most are hints to a provider, and refusing them would refuse
the client; so they are left out, counted and logged, as declared hints are. What would change how
the model samples, or what its reply means, is refused by its name, and so is what looks like a
parameter that is used.
"""

import difflib
import re
from typing import Any

import msgspec
from msgspec import inspect

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.declared_objects import Members, rewrite_declared_objects
from areal_hpc.proxy.dialects.parameters_without_effect import is_ignored_param
from areal_hpc.proxy.dialects.refused_parameters import find_refusal
from areal_hpc.proxy.metrics import MAX_NAME_CHARS

MAX_UNKNOWN_PARAMS = 100
"""Different ones in a request: it is told of each, and each is counted."""
_MAX_HARMLESS_BYTES = 16
_MIN_SIMILARITY_TO_REFUSE = 0.85
_INDEX_PATTERN = re.compile(r"\[\d+\]")


def keep_declared_members(
    body: bytes, request_type: Any, parent_key: str, unknown_params: list[str] | None
) -> bytes:
    """JSON without the members that are null or not declared, down to declared objects in it.

    SDKs write null for what they do not ask for, whether or not the server knows the name. The
    names of what else was left out are added to `unknown_params`, as `tools[].defer_loading`; where
    that is None, only what asks for nothing is left out.

    Raises:
        ProxyRequestError: 400: one of them means something, or looks like one that is used, or may
            not be left out.
    """

    def rewrite(members: Members, structs: list[inspect.StructType], key: str) -> Members:
        known = {field.encode_name for struct in structs for field in struct.fields}
        known |= {struct.tag_field for struct in structs if struct.tag_field}
        is_closed = all(struct.forbid_unknown_fields for struct in structs)
        kept: Members = {}
        for name, value in members.items():
            place = (f"{key}.{name}" if key else name)[:MAX_NAME_CHARS]
            if bytes(value) == b"null":
                continue
            if name in known or not is_closed:
                kept[name] = value
            elif _refuse_or_say_if_worth_counting(name, place, bytes(value), structs):
                if unknown_params is None:
                    problem = f"the parameter {name[:MAX_NAME_CHARS]!r} is not supported"
                    raise ProxyRequestError(400, problem, key=place)
                unknown[_INDEX_PATTERN.sub("[]", place)] = None
                if len(unknown) > MAX_UNKNOWN_PARAMS:
                    problem = f"more than {MAX_UNKNOWN_PARAMS} parameters are not supported"
                    raise ProxyRequestError(400, problem, key=place)
        return kept

    unknown = dict.fromkeys(unknown_params or ())
    rewritten = rewrite_declared_objects(body, request_type, parent_key, rewrite, skips_sound=True)
    if unknown_params is not None:
        unknown_params[:] = unknown
    return rewritten


def _refuse_or_say_if_worth_counting(
    member_name: str, key: str, raw_value: bytes, structs: list[inspect.StructType]
) -> bool:
    """Whether an undeclared member is worth counting.

    Raises:
        ProxyRequestError: 400: it would change the reply, or looks like one that is used.
    """
    if len(member_name) > MAX_NAME_CHARS:
        return True
    problem = f"the parameter {member_name!r} is not supported"
    for struct in structs:
        refusal = find_refusal(member_name, struct.cls)
        if refusal is not None:
            is_short = len(raw_value) <= _MAX_HARMLESS_BYTES
            if is_short and refusal.is_harmless_value(msgspec.json.decode(raw_value)):
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
    if near:
        raise ProxyRequestError(400, f"{problem}; did you mean {near[0]!r}?", key=key)
    return True
