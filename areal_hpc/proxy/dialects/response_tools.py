"""OpenAI Responses: the tools that a request offers, alone or in namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from areal_hpc.proxy.dialects.decoding import function_tool, refusal_of
from areal_hpc.proxy.dialects.response_items import qualified
from areal_hpc.proxy.refusal import RequestRefused


class _Function(Struct, tag="function", forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Namespace(Struct, tag="namespace", forbid_unknown_fields=True):
    name: str
    tools: list[_Function]
    description: str | None = None


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What the model may call."""

    schemas: list[dict[str, Any]]
    """As chat templates expect them."""
    origins: dict[str, tuple[str, str]]
    """Namespace and name of the tools that have a namespace, by the name the model knows."""


def offered_tools(raw: Sequence[msgspec.Raw]) -> OfferedTools:
    """Check the tools of a request.

    A tool within a namespace is known to the model as `namespace.name`, and the description of
    the namespace stands before its own.

    Raises:
        RequestRefused: 400, naming what is wrong.
    """
    offered = OfferedTools([], {})
    for i, one in enumerate(raw):
        try:
            tool = msgspec.json.decode(one, type=_Function | _Namespace)
        except msgspec.ValidationError as error:
            raise refusal_of(str(error), f"tools[{i}]") from error
        if isinstance(tool, _Function):
            offered.schemas.append(_schema(tool, f"tools[{i}]"))
            continue
        for j, function in enumerate(tool.tools):
            name = qualified(tool.name, function.name)
            offered.origins[name] = (tool.name, function.name)
            described = [text for text in (tool.description, function.description) if text]
            named = msgspec.structs.replace(
                function, name=name, description="\n".join(described) or None
            )
            offered.schemas.append(_schema(named, f"tools[{i}].tools[{j}]"))
    return offered


def _schema(tool: _Function, key: str) -> dict[str, Any]:
    if tool.defer_loading:
        problem = "all tools are shown to the model at once"
        raise RequestRefused(400, problem, key=f"{key}.defer_loading")
    fields = msgspec.structs.asdict(tool)
    del fields["defer_loading"]
    return function_tool(fields, key)
