"""Request validation shared by all dialects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import RequestError
from areal_hpc.proxy.dialects.hints import without_nulls
from areal_hpc.proxy.engine.model_call import ServedModel, ToolChoice
from areal_hpc.wire.trajectory import MAX_TEMPERATURE

Given = TypeVar("Given")
RequestT = TypeVar("RequestT")

PositiveParam = Annotated[int, Meta(ge=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Temperature = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**53), le=2**53)]
TopK = Annotated[int, Meta(ge=-1)]

_AT_PARAMETER = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"(unknown|missing required) field `([^`]+)`")


def decode(decoder: msgspec.json.Decoder[RequestT], body: bytes) -> RequestT:
    """The request in a body. A null stands for absence, under whatever name.

    Raises:
        RequestError: 400, naming the parameter that is wrong or unknown.
    """
    try:
        return _decoded(decoder, body)
    except msgspec.ValidationError as error:
        raise to_request_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error


def decode_part(raw: bytes | msgspec.Raw, form: Any, key: str) -> Any:
    """A part of a request that stays as it is until the whole has been decoded.

    Args:
        raw: JSON.
        form: The type that it is decoded to.
        key: Where it stands in the request.

    Raises:
        RequestError: 400, naming the parameter that is wrong or unknown.
    """
    try:
        return _decoded(_decoder_of(form), bytes(raw))
    except msgspec.ValidationError as error:
        raise to_request_error(str(error), key) from error


@cache
def _decoder_of(form: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(form)


def _decoded(decoder: msgspec.json.Decoder[RequestT], body: bytes) -> RequestT:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:  # perhaps of a null, which few requests hold
        return decoder.decode(without_nulls(body, decoder.type))


def to_request_error(complaint: str, inside: str = "") -> RequestError:
    """What msgspec complains about, as a refusal that names the parameter.

    Args:
        complaint: The text of its `ValidationError`.
        inside: Which parameter was decoded, if not the whole body.
    """
    where = _AT_PARAMETER.search(complaint)
    key = ".".join(part for part in (inside, where[1] if where else "") if part)
    named = _FIELD.search(complaint)
    if named and named[1] == "unknown" and not key:
        return RequestError(400, f"the parameter {named[2]!r} is not supported", key=named[2])
    if named:
        key = f"{key}.{named[2]}" if key else named[2]
    return RequestError(400, complaint, key=key)


def first_given(asked: Given | None, default: Given) -> Given:
    """What was asked for, if anything was."""
    return default if asked is None else asked


def check_token_ids(model: ServedModel, key: str, tokens: Iterable[int | str] | None) -> None:
    """An id outside the vocabulary would kill the engine.

    Raises:
        RequestError: 400, naming `key`.
    """
    vocab_size = model.encoder.vocab_size
    for token in tokens or ():
        is_id = isinstance(token, int) or token.isdecimal()
        if not is_id or not 0 <= int(token) < vocab_size:
            raise RequestError(
                400, f"{key} takes token ids below {vocab_size}, got {token!r}", key=key
            )


def check_single_grammar(named: Mapping[str, object], choice: ToolChoice) -> None:
    """The engine takes one grammar at most, and that of a reply that must call a tool is one.

    Args:
        named: Grammars under the names that the dialect has for them; None if not asked for.
        choice: What was asked of tools.

    Raises:
        RequestError: 400, naming the first.
    """
    names = [name for name, value in named.items() if value is not None]
    if len(names) > 1 or (names and choice.must_call):
        other = " and ".join(names[1:]) or "tool_choice"
        raise RequestError(400, f"{names[0]} and {other} cannot be combined", key=names[0])


class FunctionSchema(Struct):
    """A function that is offered as a tool."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def build_function_tool(definition: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A tool as chat templates expect it, from a function's fields.

    Args:
        definition: `name` and, if they are given, `description`, `parameters`, `strict`.
        key: Where it stands in the request.

    Raises:
        RequestError: 400, naming what is wrong.
    """
    try:
        function = msgspec.convert(dict(definition), FunctionSchema)
    except msgspec.ValidationError as error:
        raise to_request_error(str(error), key) from error
    fields = msgspec.structs.asdict(function)
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


def check_tools_supported(model: ServedModel, tools: Sequence[object], choice: ToolChoice) -> None:
    """A reply whose calls nobody can tell from its text would be wrong.

    Raises:
        RequestError: 400, naming `tools`.
    """
    if tools and choice.mode != "none" and model.tool_call_parser is None:
        raise RequestError(
            400,
            "no tool-call parser is configured",
            key="tools",
            hint="set inference.tool_call_parser to the model's format",
        )


def parse_tool_choice(
    tools: Sequence[Mapping[str, Any]], mode: str | None, name: str | None, *, parallel: bool
) -> ToolChoice:
    """What a request says about calling tools.

    Args:
        tools: Those it offers.
        mode: `none`, `auto` or `required`; None is `auto`.
        name: The tool that must be called.
        parallel: A reply may hold several calls.

    Raises:
        RequestError: 400, naming `parse_tool_choice`.
    """
    if name is not None:
        if all(tool["function"]["name"] != name for tool in tools):
            raise RequestError(400, f"there is no tool {name!r}", key="tool_choice")
        return ToolChoice("required", name, parallel)
    if not tools:
        if mode == "required":
            raise RequestError(400, "tool_choice needs tools", key="tool_choice")
        return ToolChoice("none", None, parallel)
    if mode == "required":
        return ToolChoice("required", None, parallel)
    return ToolChoice("none" if mode == "none" else "auto", None, parallel)


def encode_json_schema(schema: Mapping[str, Any] | None, choice: ToolChoice) -> str | None:
    """The grammar of a reply's text: its schema as JSON.

    A reply that must call a tool has no text that it could hold for; the tool's own grammar does.
    """
    if schema is None or choice.must_call:
        return None
    return msgspec.json.encode(schema).decode()


def effort_variables(effort: object, model: ServedModel) -> dict[str, Any] | None:
    """How the chat template is told how hard to think; None when it cannot be told."""
    if effort == "none" and model.reasoning_parser is not None:
        return {"enable_thinking": False, "thinking": False}
    if model.reasoning_parser == "gpt-oss" and effort in ("low", "medium", "high"):
        return {"reasoning_effort": effort}
    return None
