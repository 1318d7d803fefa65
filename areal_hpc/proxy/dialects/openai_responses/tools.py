"""OpenAI Responses tools, with namespaces.

Tools that OpenAI's servers would run, and that coding agents offer by themselves, are left out when
there are functions beside them: the model is not told of them, so it calls none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from areal_hpc.proxy.dialects.hints import Hint, hints_in
from areal_hpc.proxy.dialects.openai_responses.input_items import qualify_tool_name
from areal_hpc.proxy.dialects.validation import build_function_tool, decode_part

_HOSTED = re.compile(r"(web_search|web_search_preview|image_generation|tool_search)(_[0-9_]+)?")
"""Types of such tools, dated or not. Those that name a client's own files, servers or containers
are not among them: who asks for one needs it."""


class _Kind(Struct):
    type: str = ""


class _ToolFunction(Struct, tag="function", forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Hint = None


class _Namespace(Struct, tag="namespace", forbid_unknown_fields=True):
    name: str
    tools: list[_ToolFunction]
    description: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSet:
    """What the model may call."""

    schemas: list[dict[str, Any]]
    """As chat templates expect them."""
    origins: dict[str, tuple[str, str]]
    """Namespace and name of the tools that have a namespace, by the name the model knows."""
    ignored: set[str]
    """Hints in the tools, and tools that are left out."""


def parse_tools(raw: Sequence[msgspec.Raw]) -> ToolSet:
    """Check the tools of a request.

    A tool within a namespace is known to the model as `namespace.name`, and the description of
    the namespace stands before its own.

    Raises:
        RequestError: 400, naming what is wrong.
    """
    offered = ToolSet([], {}, set())
    kinds = [decode_part(one, _Kind, f"tools[{i}]").type for i, one in enumerate(raw)]
    hosted = [_HOSTED.fullmatch(kind) for kind in kinds]
    for i, one in enumerate(raw):
        named = hosted[i]
        if named is not None and not all(hosted):
            offered.ignored.add(f"tools[{named[1]}]")
            continue
        tool = decode_part(one, _ToolFunction | _Namespace, f"tools[{i}]")
        if isinstance(tool, _ToolFunction):
            offered.ignored.update(hints_in(tool, "tools[]."))
            offered.schemas.append(_schema(tool, f"tools[{i}]"))
            continue
        for j, function in enumerate(tool.tools):
            offered.ignored.update(hints_in(function, "tools[]."))
            name = qualify_tool_name(tool.name, function.name)
            offered.origins[name] = (tool.name, function.name)
            described = [text for text in (tool.description, function.description) if text]
            renamed = msgspec.structs.replace(
                function, name=name, description="\n".join(described) or None
            )
            offered.schemas.append(_schema(renamed, f"tools[{i}].tools[{j}]"))
    return offered


def _schema(tool: _ToolFunction, key: str) -> dict[str, Any]:
    fields = msgspec.structs.asdict(tool)
    del fields["defer_loading"]
    return build_function_tool(fields, key)
