"""Table of every dialect's parameters, read from the requests by which they are validated."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from areal_hpc.proxy.dialects.parameters import (
    REFUSED_SAMPLING_OF_OTHER_ENGINES,
    Refusal,
    is_ignored_param,
    list_struct_types,
)


def list_effective_params(request_type: type[msgspec.Struct]) -> list[str]:
    return [
        field.encode_name
        for field in _list_request_fields(request_type)
        if not is_ignored_param(field.type)
    ]


def list_ignored_params_of(request_type: type[msgspec.Struct]) -> list[str]:
    params = _list_ignored_params_within(inspect.type_info(request_type), "")
    return [*dict.fromkeys(name.removeprefix(".") for name in params)]


def get_refusal_by_param(request_type: type[msgspec.Struct]) -> dict[str, Refusal]:
    own: Mapping[str, Refusal] = getattr(request_type, "refused", {})
    return dict(own)


def _list_request_fields(request_type: type[msgspec.Struct]) -> Iterable[inspect.Field]:
    declared = inspect.type_info(request_type)
    assert isinstance(declared, inspect.StructType)
    return declared.fields


def _list_ignored_params_within(declared_type: inspect.Type, prefix: str) -> Iterator[str]:
    for below, suffix in _list_object_types_within(declared_type):
        for struct in list_struct_types(below):
            for field in struct.fields:
                name = f"{prefix}{suffix}{field.encode_name}"
                if is_ignored_param(field.type):
                    yield name
                else:
                    yield from _list_ignored_params_within(field.type, name)


def _list_object_types_within(declared_type: inspect.Type) -> Iterator[tuple[inspect.Type, str]]:
    """List types of a value's objects, each with the prefix of their names."""
    match declared_type:
        case inspect.Metadata(extra={"items": declared}):
            yield inspect.type_info(declared), "[]."
        case inspect.Metadata(extra={"form": declared}):
            yield inspect.type_info(declared), "."
        case inspect.Metadata():
            yield from _list_object_types_within(declared_type.type)
        case inspect.UnionType():
            for member in declared_type.types:
                yield from _list_object_types_within(member)
        case inspect.ListType():
            yield declared_type.item_type, "[]."
        case inspect.StructType():
            yield declared_type, "."


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _format_refusals(refusals: Mapping[str, Refusal]) -> Iterator[tuple[str, str]]:
    """Names, and the way out that they share."""
    by_way_out: dict[str, list[str]] = defaultdict(list)
    for name, refusal in refusals.items():
        by_way_out[refusal.way_out].append(name)
    for way_out, names in sorted(by_way_out.items(), key=lambda item: sorted(item[1])):
        yield _format_names(names), way_out


def render_parameter_table(request_type_by_route: Mapping[str, type[msgspec.Struct]]) -> str:
    """Render the treatment of each parameter of the requests, by their routes, as Markdown."""
    lines = ["| route | parameters | what is done with them |", "|---|---|---|"]

    def add(*cells: Any) -> None:
        lines.append(f"| {' | '.join(cells)} |")

    for path, form in request_type_by_route.items():
        route = f"`POST {path}`"
        add(route, _format_names(list_effective_params(form)), "used")
        add(route, _format_names(list_ignored_params_of(form)), "no effect")
        for names, way_out in _format_refusals(get_refusal_by_param(form)):
            add(route, names, f"refused: {way_out}")
    for names, way_out in _format_refusals(REFUSED_SAMPLING_OF_OTHER_ENGINES):
        add("others", names, f"refused: {way_out}")
    return "\n".join(lines)
