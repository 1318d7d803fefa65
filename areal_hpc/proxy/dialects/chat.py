"""OpenAI Chat Completions: request -> `ModelCall`.

Every parameter is honoured or refused by name. Accepted without effect are those that promise
none here: `user`, `metadata`, `safety_identifier`, `prompt_cache_key` (labels and hints) and
`model` (a cell serves one model, whatever name an agent has for it). `seed` is passed on; SGLang
uses it when it runs deterministically.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from areal_hpc.proxy.generation import SamplingParams
from areal_hpc.proxy.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.session.normalise import normalise_chat_message
from areal_hpc.wire.proxy import SamplingDefaults

Given = TypeVar("Given")


class _TextPart(Struct):
    type: str
    text: str | None = None


class _Function(Struct):
    name: str
    arguments: str


class _ToolCall(Struct):
    function: _Function
    id: str | None = None
    type: Literal["function"] = "function"


class _ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _JsonSchema(Struct):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _NamedFunction(Struct):
    name: str


class _NamedChoice(Struct, forbid_unknown_fields=True):
    function: _NamedFunction
    type: Literal["function"] = "function"


class _FunctionSchema(Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct):
    function: _FunctionSchema
    type: Literal["function"] = "function"


Positive = Annotated[int, Meta(ge=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class ChatRequest(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions, as far as this proxy can honour it."""

    messages: Annotated[list[_ChatMessage], Meta(min_length=1)]
    model: str = ""
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logit_bias: dict[str, Bias] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Beyond OpenAI, under SGLang's names:
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    stop_token_ids: list[int] | None = None
    regex: str | None = None
    ebnf: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(ChatRequest)
_AT_PARAMETER = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"(unknown|missing required) field `([^`]+)`")


def parse(
    body: bytes, defaults: SamplingDefaults, model: ServedModel
) -> tuple[ChatRequest, ModelCall]:
    """Validate a request.

    Args:
        body: As received.
        defaults: Apply where the request is silent.
        model: Who will answer.

    Raises:
        RequestRefused: 400, naming the parameter that is wrong or cannot be honoured.
    """
    request = _decode(body)
    _refuse_contradictions(request)
    _refuse_unknown_tokens(request, model.encoder.vocab_size)
    _refuse_other_media(request)
    tools = _tools(request.tools or [])
    choice = _tool_choice(request, tools)
    if tools and choice.mode != "none" and model.tool_call_parser is None:
        raise RequestRefused(
            400,
            "no tool-call parser is configured",
            key="tools",
            hint="set inference.tool_call_parser to the model's format",
        )
    return request, _call_of(request, defaults, tools, choice)


def _decode(body: bytes) -> ChatRequest:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal_of(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRefused(400, f"the body is not JSON: {error}") from error


def _refusal_of(complaint: str) -> RequestRefused:
    where = _AT_PARAMETER.search(complaint)
    key = where[1] if where else ""
    named = _FIELD.search(complaint)
    if named and named[1] == "unknown" and not key:
        return RequestRefused(400, f"the parameter {named[2]!r} is not supported", key=named[2])
    if named:
        key = f"{key}.{named[2]}" if key else named[2]
    return RequestRefused(400, complaint, key=key)


def _refuse_contradictions(request: ChatRequest) -> None:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestRefused(
            400,
            f"max_tokens {request.max_tokens} and max_completion_tokens "
            f"{request.max_completion_tokens} contradict each other",
            key="max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise RequestRefused(400, "top_logprobs needs logprobs", key="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestRefused(400, "stream_options needs stream", key="stream_options")
    form = request.response_format
    if form is not None and form.type == "json_schema" and form.json_schema is None:
        raise RequestRefused(400, "the schema is missing", key="response_format.json_schema")


def _refuse_unknown_tokens(request: ChatRequest, vocab_size: int) -> None:
    """An id outside the vocabulary would kill the engine."""
    if any(not 0 <= token < vocab_size for token in request.stop_token_ids or ()):
        raise RequestRefused(400, f"token ids are below {vocab_size}", key="stop_token_ids")
    for token in request.logit_bias or ():
        if not token.isdecimal() or int(token) >= vocab_size:
            raise RequestRefused(
                400, f"keys are token ids below {vocab_size}, got {token!r}", key="logit_bias"
            )


def _refuse_other_media(request: ChatRequest) -> None:
    for i, message in enumerate(request.messages):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if part.type != "text" or part.text is None:
                    raise RequestRefused(
                        400,
                        f"content parts of type {part.type!r} are not supported",
                        key=f"messages[{i}].content[{j}].type",
                    )


def _tools(raw: Sequence[msgspec.Raw]) -> list[dict[str, Any]]:
    """The function schemas as the client wrote them, once they have been checked."""
    tools: list[dict[str, Any]] = []
    for i, one in enumerate(raw):
        try:
            msgspec.json.decode(one, type=_Tool)
        except msgspec.ValidationError as error:
            refusal = _refusal_of(str(error))
            key = ".".join(part for part in (f"tools[{i}]", refusal.param) if part)
            raise RequestRefused(400, refusal.message, key=key) from error
        tools.append(msgspec.json.decode(one))
    return tools


def _tool_choice(request: ChatRequest, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    asked = request.tool_choice
    parallel = request.parallel_tool_calls is not False
    if isinstance(asked, _NamedChoice):
        name = asked.function.name
        if all(tool["function"]["name"] != name for tool in tools):
            raise RequestRefused(400, f"there is no tool {name!r}", key="tool_choice")
        return ToolChoice("required", name, parallel)
    if asked == "required" and not tools:
        raise RequestRefused(400, "there are no tools to choose from", key="tool_choice")
    return ToolChoice((asked or "auto") if tools else "none", None, parallel)


def _call_of(
    request: ChatRequest,
    defaults: SamplingDefaults,
    tools: list[dict[str, Any]],
    choice: ToolChoice,
) -> ModelCall:
    messages = [normalise_chat_message(msgspec.to_builtins(one)) for one in request.messages]
    return ModelCall(
        messages=messages,
        tools=tools if choice.mode != "none" else None,
        tool_choice=choice,
        variables=request.chat_template_kwargs or None,
        sampling=_sampling_of(request, defaults, choice),
        max_tokens_key="max_tokens" if request.max_tokens else "max_completion_tokens",
        n=request.n or 1,
        top_logprobs=request.top_logprobs or 0,
    )


def _sampling_of(
    request: ChatRequest, defaults: SamplingDefaults, choice: ToolChoice
) -> SamplingParams:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    sampling = SamplingParams(
        temperature=_either(request.temperature, defaults.temperature),
        max_new_tokens=request.max_completion_tokens or request.max_tokens or 0,
        top_p=_either(request.top_p, defaults.top_p),
        top_k=_either(request.top_k, defaults.top_k) or -1,
        min_p=request.min_p or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=_either(request.repetition_penalty, 1.0),
        stop=[text for text in stop or () if text] or None,
        stop_token_ids=request.stop_token_ids or None,
        sampling_seed=request.seed,
        logit_bias=request.logit_bias or None,
        json_schema=_json_schema(request.response_format),
        regex=request.regex,
        ebnf=request.ebnf,
    )
    grammars = sampling.grammars
    if len(grammars) > 1 or (grammars and choice.mode == "required"):
        name = "response_format" if grammars[0] == "json_schema" else grammars[0]
        other = " and ".join(grammars[1:]) or "tool_choice"
        raise RequestRefused(400, f"{name} and {other} cannot both hold", key=name)
    return sampling


def _json_schema(form: _ResponseFormat | None) -> str | None:
    """The schema that the reply must follow, as JSON."""
    if form is None or form.type == "text":
        return None
    schema = form.json_schema.schema if form.json_schema is not None else {"type": "object"}
    return msgspec.json.encode(schema).decode()


def _either(asked: Given | None, default: Given) -> Given:
    return default if asked is None else asked
