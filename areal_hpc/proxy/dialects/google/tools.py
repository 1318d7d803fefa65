"""Tools of Google's requests, and which of them a reply may or must call."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.google.schema import convert_to_json_schema
from areal_hpc.proxy.dialects.google.spelling import spell_in_camel_case
from areal_hpc.proxy.dialects.parameters_without_effect import IgnoredParam, list_ignored_params
from areal_hpc.proxy.dialects.validation import (
    ToolName,
    build_function_tool,
    decode_request_json,
    parse_tool_choice,
)
from areal_hpc.proxy.engine.model_call import ServedModel, ToolChoice

_CHOICE_KEY = "toolConfig.functionCallingConfig"


class _FunctionDeclaration(Struct, rename="camel", forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    behavior: IgnoredParam = None
    response: IgnoredParam = None
    """The model is told what a function takes, not what it gives back."""
    response_json_schema: IgnoredParam = None


class _Tool(Struct, rename="camel", forbid_unknown_fields=True):
    """Functions, or tools of other kinds, which only Google's servers or models know.

    Those are left out beside functions: agents offer them by themselves.
    """

    function_declarations: list[msgspec.Raw] | None = None
    code_execution: Any = None
    enterprise_web_search: Any = None
    google_maps: Any = None
    google_search: Any = None
    google_search_retrieval: Any = None
    url_context: Any = None
    computer_use: Any = None
    file_search: Any = None
    mcp_servers: Any = None
    retrieval: Any = None


class FunctionCallingConfig(Struct, rename="camel", forbid_unknown_fields=True):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] = "AUTO"
    allowed_function_names: list[str] | None = None
    stream_function_call_arguments: IgnoredParam = None


class ToolConfig(Struct, rename="camel", forbid_unknown_fields=True):
    function_calling_config: FunctionCallingConfig | None = None
    include_server_side_tool_invocations: IgnoredParam = None
    retrieval_config: IgnoredParam = None


def parse_tools(
    raw_tools: Sequence[msgspec.Raw], model: ServedModel, ignored: list[str], dropped: list[str]
) -> list[dict[str, Any]]:
    """The functions as chat templates expect them.

    Hints are added to `ignored`, tools that are left out to `dropped`.

    Raises:
        ProxyRequestError: 400, naming what is wrong, or a tool that nobody here can run.
    """
    unknown = ignored if model.ignores_unknown else None
    functions: list[dict[str, Any]] = []
    hosted: dict[str, str] = {}
    hints: set[str] = set()
    for i, one in enumerate(raw_tools):
        key = f"tools[{i}]"
        tool: _Tool = decode_request_json(spell_in_camel_case(one, _Tool), _Tool, key, unknown)
        _, *others = zip(tool.__struct_fields__, tool.__struct_encode_fields__, strict=True)
        given = [wire_name for name, wire_name in others if getattr(tool, name) is not None]
        hosted |= {name: f"{key}.{name}" for name in given}
        for j, declared in enumerate(tool.function_declarations or ()):
            place = f"{key}.functionDeclarations[{j}]"
            body = spell_in_camel_case(declared, _FunctionDeclaration)
            function: _FunctionDeclaration = decode_request_json(
                body, _FunctionDeclaration, place, unknown
            )
            hints.update(list_ignored_params(function, "tools[].functionDeclarations[]."))
            functions.append(_build_tool(function, place))
    if hosted and not functions:
        name, place = next(iter(hosted.items()))
        hint = "declare a function that the agent runs"
        raise ProxyRequestError(400, f"{name} is run by Google's servers", key=place, hint=hint)
    ignored += sorted(hints)
    dropped += sorted(hosted)
    return functions


def _build_tool(function: _FunctionDeclaration, tool_key: str) -> dict[str, Any]:
    schema, key = function.parameters, f"{tool_key}.parameters"
    if function.parameters_json_schema is not None:
        if schema is not None:
            problem = "parameters and parametersJsonSchema cannot be combined"
            raise ProxyRequestError(400, problem, key=key)
        schema, key = function.parameters_json_schema, f"{tool_key}.parametersJsonSchema"
    built = convert_to_json_schema(schema, key)
    return build_function_tool(function.name, function.description, built, None)


def read_tool_choice(
    tool_config: ToolConfig | None, tools: Sequence[dict[str, Any]], model: ServedModel
) -> ToolChoice:
    """The choice that a request makes. Calls follow their schemas unless the mode is AUTO."""
    config = (
        tool_config.function_calling_config if tool_config else None
    ) or FunctionCallingConfig()
    names = config.allowed_function_names or []
    if names and config.mode not in ("ANY", "VALIDATED"):
        problem = f"allowedFunctionNames needs mode ANY or VALIDATED, got {config.mode}"
        raise ProxyRequestError(400, problem, key=_CHOICE_KEY)
    if config.mode == "ANY" and not tools:
        raise ProxyRequestError(400, "mode ANY needs functions", key=_CHOICE_KEY)
    offered = {tool["function"]["name"] for tool in tools}
    if missing := [name for name in names if name not in offered]:
        problem = f"there is no function {missing[0]!r}"
        raise ProxyRequestError(400, problem, key=f"{_CHOICE_KEY}.allowedFunctionNames")
    mode = {"ANY": "required", "NONE": "none"}.get(config.mode, "auto")
    choice = parse_tool_choice(model, tools, mode, None, parallel=True, allowed_names=names)
    follows = config.mode in ("ANY", "VALIDATED")
    return msgspec.structs.replace(choice, follows_schemas=follows)
