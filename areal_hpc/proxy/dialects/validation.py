"""Decoding and validation of requests, shared by all dialects."""

import asyncio
import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.parameters import keep_declared_members
from areal_hpc.proxy.engine.model_call import ServedModel, ToolChoice
from areal_hpc.proxy.metrics import MAX_NAME_CHARS
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import write_json_text
from areal_hpc.wire.trajectory import MAX_TEMPERATURE

Given = TypeVar("Given")

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit of alternatives per token. Millions of them would kill SGLang's scheduler."""
PositiveParam = Annotated[int, Meta(ge=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Temperature = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**53), le=2**53)]
WideSeed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Seed of 64 bits, as clients draw them; the engine takes fewer bits."""
MAX_TOP_K = 2**31 - 1
"""Largest int32. A larger value would kill SGLang's scheduler."""
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOP_K)]
MAX_TOOLS = 1024
ToolName = Annotated[str, Meta(min_length=1)]

MAX_OBJECTS, MAX_OBJECTS_PER_MESSAGE = 65_536, 16
"""Limit of a body's members, objects and lists together, or per allowed message if that is more."""
MAX_UNCOUNTED_BODY_BYTES = 2 * MAX_OBJECTS
"""Size up to which a body cannot exceed the limit: each takes two bytes at least."""
MAX_ITEMS = 1 << 21
"""Limit of values in a body's lists; only token ids may be so many."""
MAX_SURROGATES = 1 << 20
"""Limit of escapes that may be halves of a surrogate pair, and of escaped backslashes."""
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_HIGH_PATTERN = re.compile(_HIGH + b"(?!" + _LOW + b")")
_LONE_LOW_PATTERN = re.compile(_LOW + b"(?<!" + _HIGH + _LOW + b")")
"""Two patterns that begin with the half that they find: one for both is ten times as slow."""
_ERROR_PATH_PATTERN = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD_ERROR_PATTERN = re.compile(r"(unknown|missing required) field `([^`]+)`")


async def refuse_too_many_values(body: bytes, max_messages: int) -> None:
    """Refuse a body with too many values before it is decoded: its size hardly shows its cost."""
    max_objects = max(MAX_OBJECTS, MAX_OBJECTS_PER_MESSAGE * max_messages)
    objects, items = _count_values(np.frombuffer(body, np.uint8))
    if objects > max_objects or items > MAX_ITEMS:  # perhaps only within texts
        objects, items = await asyncio.to_thread(_count_values_outside_texts, body)
    surrogates = 0
    if len(body) > MAX_SURROGATES:
        surrogates = body.count(rb"\ud") + body.count(rb"\uD")
    for count, most, kind in (
        (objects, max_objects, "members, objects and lists"),
        (items, MAX_ITEMS, "values"),
        (surrogates, MAX_SURROGATES, "escaped surrogates"),
        (body.count(rb"\\") if surrogates else 0, MAX_SURROGATES, "escaped backslashes"),
    ):
        if count > most:
            raise ProxyRequestError(400, f"the body has too many {kind}: {count} (limit {most})")


def _count_values(chars: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Count colons and brackets, and commas; `bytes.count` is slow if there are many."""
    colons, braces, brackets, commas = (int(np.count_nonzero(chars == ord(c))) for c in ":{[,")
    return colons + braces + brackets, commas


def _count_values_outside_texts(body: bytes) -> tuple[int, int]:
    chars = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    return _count_values(chars[np.cumsum(chars == ord('"'), dtype=np.uint8) & 1 == 0])


def decode_request_json(
    body: bytes | msgspec.Raw,
    json_type: Any,
    key: str = "",
    unknown_params: list[str] | None = None,
) -> Any:
    """Decode a JSON body, or the part of one under `key`, as the type `json_type`.

    A null counts as absent under any name. A member that `json_type` does not declare is left out
    if it requests nothing, or if there is a list `unknown_params` for its name; else it is refused.
    """
    try:
        if isinstance(body, bytes):
            body = body.removeprefix(codecs.BOM_UTF8)
            if not body.isascii():
                body.decode()  # a decoder does not check texts that its type does not declare
        try:
            return _decode_declared_members(body, json_type, key, unknown_params)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # perhaps because of lone halves of surrogate pairs
            body = _replace_lone_surrogates(bytes(body))
            return _decode_declared_members(body, json_type, key, unknown_params)
    except msgspec.ValidationError as error:
        raise _to_request_error(str(error), key) from error
    except (ValueError, RecursionError) as error:
        raise ProxyRequestError(400, f"the body is not JSON: {error}") from error


def _decode_declared_members(
    body: bytes | msgspec.Raw, json_type: Any, key: str, unknown_params: list[str] | None
) -> Any:
    decoder = _get_decoder(json_type)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:  # perhaps because of undeclared members
        return decoder.decode(keep_declared_members(bytes(body), json_type, key, unknown_params))


def _replace_lone_surrogates(body: bytes) -> bytes:
    body = body.replace(rb"\\", b"\xff")  # hide escaped backslashes; UTF-8 never has this byte
    for pattern in (_LONE_HIGH_PATTERN, _LONE_LOW_PATTERN):
        body = pattern.sub(rb"\\ufffd", body)
    return body.replace(b"\xff", rb"\\")


@cache
def _get_decoder(json_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(json_type)


def _to_request_error(problem: str, parent_key: str) -> ProxyRequestError:
    path = _ERROR_PATH_PATTERN.search(problem)
    key = ".".join(part for part in (parent_key, path[1] if path else "") if part)
    field = _FIELD_ERROR_PATTERN.search(problem)
    if field and field[1] == "unknown" and not key:
        return ProxyRequestError(400, f"the parameter {field[2]!r} is not supported", key=field[2])
    if field:
        key = f"{key}.{field[2]}" if key else field[2]
    return ProxyRequestError(400, problem, key=key)


def fill_default(value: Given | None, default: Given) -> Given:
    return default if value is None else value


def fold_seed_into_engine_range(seed: int | None) -> int | None:
    return seed if seed is None or abs(seed) <= 2**53 else seed & 0x3FFFFFFF


MAX_ID_DIGITS = 10
"""Limit of digits, because Python refuses numbers of thousands of digits."""


def check_token_ids(model: ServedModel, key: str, tokens: Iterable[int | str] | None) -> None:
    """Refuse ids outside the vocabulary, which would kill the engine."""
    vocab_size = model.encoder.vocab_size
    for token in tokens or ():
        is_id = isinstance(token, int) or (token.isdecimal() and len(token) <= MAX_ID_DIGITS)
        if not is_id or not 0 <= int(token) < vocab_size:
            raise ProxyRequestError(
                400, f"{key} takes token ids below {vocab_size}, got {token!r}", key=key
            )


def format_left_out_part(part_type: str) -> str:
    return f"[{part_type} left out: this model reads text]"


def join_user_texts(parts: Iterable[str | Message]) -> Iterator[Message]:
    """Join consecutive texts of a user to one message each; other messages stay between them."""
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            yield {"role": "user", "content": "\n".join(map(str, group))}
        else:
            yield from (part for part in group if not isinstance(part, str))


HOSTED_TOOL_TYPES = (
    "apply_patch*",
    "bash_*",
    "code_execution*",
    "code_interpreter*",
    "computer*",
    "file_search*",
    "image_generation*",
    "local_shell*",
    "mcp*",
    "memory_*",
    "shell*",
    "text_editor_*",
    "tool_search*",
    "web_fetch*",
    "web_search*",
)
"""Patterns of the types of tools that only a provider's models or servers have."""


class TypedObject(Struct):
    type: str = ""


def filter_out_hosted_tools(
    raw_tools: Sequence[msgspec.Raw], dropped: list[str]
) -> list[tuple[int, msgspec.Raw]]:
    """Return the tools that are not hosted, each with its index in the list.

    A provider's servers would run the hosted ones; coding agents offer them unasked. The types of
    these are added to `dropped`.
    """
    if len(raw_tools) > MAX_TOOLS:
        problem = f"too many tools: {len(raw_tools)} (limit {MAX_TOOLS})"
        raise ProxyRequestError(400, problem, key="tools")
    kinds = [
        decode_request_json(raw, TypedObject, f"tools[{i}]").type for i, raw in enumerate(raw_tools)
    ]
    is_hosted = [any(fnmatchcase(kind, hosted) for hosted in HOSTED_TOOL_TYPES) for kind in kinds]
    if is_hosted and all(is_hosted):
        problem = f"tools of type {kinds[0]!r} run on a provider's servers, which are not here"
        hint = "offer a function that does the same"
        raise ProxyRequestError(400, problem, key="tools[0].type", hint=hint)
    dropped += sorted(
        {kind[:MAX_NAME_CHARS] for kind, hosted in zip(kinds, is_hosted, strict=True) if hosted}
    )
    return [(i, raw_tool) for i, raw_tool in enumerate(raw_tools) if not is_hosted[i]]


def build_function_tool(
    function_name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
) -> dict[str, Any]:
    fields = {"description": description, "parameters": parameters, "strict": strict}
    present = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": function_name, **present}}


def parse_tool_choice(
    model: ServedModel,
    tools: Sequence[Mapping[str, Any]],
    mode: str | None,
    tool_name: str | None,
    *,
    parallel: bool,
    allowed_names: Sequence[str] = (),
) -> ToolChoice:
    """Return the tool choice of a request that offers `tools`.

    Its mode is `none`, `auto` or `required`; None is `auto`. With a `tool_name` that tool must be
    called; with `allowed_names` no other may be.
    """
    offered = {tool["function"]["name"] for tool in tools}
    for name in (*allowed_names, *([] if tool_name is None else [tool_name])):
        if name not in offered:
            raise ProxyRequestError(400, f"there is no tool {name!r}", key="tool_choice")
    if mode == "required" and not tools:
        raise ProxyRequestError(400, "tool_choice needs tools", key="tool_choice")
    if not tools or (mode == "none" and tool_name is None):
        return ToolChoice("none", None, parallel)
    if model.tool_call_parser is None:
        raise ProxyRequestError(
            400,
            "no tool-call parser is configured",
            key="tools",
            hint="set inference.tool_call_parser to the model's format",
        )
    must_call = mode == "required" or tool_name is not None
    return ToolChoice(
        "required" if must_call else "auto", tool_name, parallel, tuple(allowed_names)
    )


def encode_text_schema(schema: Mapping[str, Any] | None, tool_choice: ToolChoice) -> str | None:
    """Encode the schema of a reply's text; a forced tool call has its own grammar instead."""
    if schema is None or tool_choice.must_call:
        return None
    return write_json_text(schema)


def write_choice_grammar(choices: Iterable[str]) -> str:
    """Write the grammar (EBNF) that accepts one of several texts."""
    return "root ::= " + " | ".join(msgspec.json.encode(choice).decode() for choice in choices)


_REASONING_SWITCH_VARIABLES = ("enable_thinking", "thinking")
_EFFORTS = ("low", "medium", "high")
"""Efforts that templates accept; `_NEAREST_EFFORT` maps others that clients send."""
_NEAREST_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}


def build_reasoning_variables(
    model: ServedModel,
    key: str,
    ignored: list[str],
    *,
    effort: object = None,
    thinks: bool | None = None,
) -> dict[str, Any]:
    """Build the template variables for an effort, or for whether to reason; None sets nothing.

    If the template reads none of them, the request has no effect, and `key` is added to `ignored`.
    """
    variable_names = model.template.variables
    is_requested = effort is not None or thinks is not None
    if thinks is None and isinstance(effort, str):
        thinks = effort != "none"
    variables: dict[str, Any] = {}
    if thinks is not None:
        variables = {name: thinks for name in _REASONING_SWITCH_VARIABLES if name in variable_names}
    nearest = _NEAREST_EFFORT.get(effort, effort) if isinstance(effort, str) else None
    if "reasoning_effort" in variable_names and nearest in _EFFORTS:
        variables["reasoning_effort"] = nearest
    if is_requested and not variables:
        ignored.append(key)
    return variables


class CustomFormat(Struct):
    type: Literal["text", "grammar"] = "text"
    syntax: str = ""
    definition: str = ""


def build_custom_tool_schema(
    tool_name: str, description: str | None, input_format: CustomFormat, ignored: set[str]
) -> dict[str, Any]:
    """Build a function that takes the tool's input, which a regular expression may constrain.

    The engine supports no other grammar in a call's JSON: the description of the tool has it, and
    it is added to `ignored`.
    """
    text: dict[str, Any] = {"type": "string"}
    if input_format.type == "grammar" and input_format.syntax == "regex":
        text["pattern"] = input_format.definition
    elif input_format.type == "grammar":
        ignored.add("tools[].format")
        rule = f"Its input follows this {input_format.syntax} grammar:\n{input_format.definition}"
        description = f"{description}\n{rule}" if description else rule
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return build_function_tool(tool_name, description, schema, "pattern" in text or None)


def encode_custom_input(text: str) -> str:
    return write_json_text({"input": text})


def read_custom_input(arguments: str) -> str:
    """Read the input of a custom tool's call; malformed arguments count as the input."""
    text = (decode_arguments(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments


def decode_arguments(arguments: str) -> dict[str, Any] | None:
    """Decode a call's arguments; None if they are not a JSON object."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def format_call_as_text(tool_name: str, arguments: str) -> str:
    """Format a call whose arguments are not an object, for APIs that allow only objects."""
    return f'{{"name": {msgspec.json.encode(tool_name).decode()}, "arguments": {arguments}}}'
