"""OpenAI Responses tools, as chat templates expect them, and what clients call them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from areal_hpc.proxy.dialects.custom_tools import CustomFormat, build_custom_tool_schema
from areal_hpc.proxy.dialects.parameters import IgnoredParam, list_ignored_params
from areal_hpc.proxy.dialects.validation import (
    ToolName,
    build_function_tool,
    decode_request_json,
    filter_out_hosted_tools,
)
from areal_hpc.proxy.engine.model_call import ServedModel


class _ToolFunction(Struct, tag="function", forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: IgnoredParam = None


class _ToolNamespace(Struct, tag="namespace", forbid_unknown_fields=True):
    name: str
    tools: list[_ToolFunction]
    description: str | None = None


class _CustomTool(Struct, tag="custom", forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    format: CustomFormat = msgspec.field(default_factory=CustomFormat)
    defer_loading: IgnoredParam = None


AnyTool = _ToolFunction | _ToolNamespace | _CustomTool


@dataclass(slots=True)
class OfferedTools:
    schemas: list[dict[str, Any]] = field(default_factory=list)
    namespace_and_name_by_tool: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of the tools that have a namespace, by the name the model knows."""
    custom: set[str] = field(default_factory=set)


def qualify_tool_name(namespace: str | None, tool_name: str) -> str:
    return f"{namespace}.{tool_name}" if namespace and namespace != tool_name else tool_name


def parse_tools(
    raw_tools: Sequence[msgspec.Raw], model: ServedModel, ignored: list[str], dropped: list[str]
) -> OfferedTools:
    """The tools of a request. Hints in them are added to `ignored`, types left out to `dropped`.

    A tool within a namespace is known to the model as `namespace.name`, and the description of
    the namespace stands before its own. A custom tool is a function of one text.
    """
    offered = OfferedTools()
    hints: set[str] = set()
    unknown = ignored if model.ignores_unknown else None
    for i, one in filter_out_hosted_tools(raw_tools, model, dropped):
        tool: AnyTool = decode_request_json(one, AnyTool, f"tools[{i}]", unknown)
        for declared in tool.tools if isinstance(tool, _ToolNamespace) else [tool]:
            hints.update(list_ignored_params(declared, "tools[]."))
            if isinstance(declared, _CustomTool):
                offered.custom.add(declared.name)
                offered.schemas.append(
                    build_custom_tool_schema(
                        declared.name, declared.description, declared.format, hints
                    )
                )
                continue
            name, description = declared.name, declared.description
            if isinstance(tool, _ToolNamespace):
                name = qualify_tool_name(tool.name, name)
                offered.namespace_and_name_by_tool[name] = (tool.name, declared.name)
                description = "\n".join(filter(None, (tool.description, description))) or None
            offered.schemas.append(
                build_function_tool(name, description, declared.parameters, declared.strict)
            )
    ignored += sorted(hints)
    return offered
