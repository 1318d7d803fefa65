"""OpenAI Chat Completions: request -> `ModelCall`.

Every parameter is honoured or refused by name. Accepted without effect are those that promise
none here: `user`, `metadata`, `safety_identifier`, `prompt_cache_key` (labels and hints) and
`model` (a cell serves one model, whatever name an agent has for it). `seed` is passed on; SGLang
uses it when it runs deterministically.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.proxy.dialects.decoding import (
    Bias,
    FunctionSchema,
    Penalty,
    Positive,
    Probability,
    Sampling,
    Seed,
    StreamOptions,
    Temperature,
    decode,
    either,
    json_schema,
    refusal_of,
    refuse_tools_without_parser,
    refuse_two_grammars,
    refuse_unknown_tokens,
    tool_choice,
)
from areal_hpc.proxy.generation import SamplingParams
from areal_hpc.proxy.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.session.normalise import normalise_chat_message
from areal_hpc.wire.proxy import SamplingDefaults


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


class ChatMessage(Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _JsonSchema(Struct):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """What form the reply must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _NamedFunction(Struct):
    name: str


class _NamedChoice(Struct, forbid_unknown_fields=True):
    function: _NamedFunction
    type: Literal["function"] = "function"


class _Tool(Struct):
    function: FunctionSchema
    type: Literal["function"] = "function"


class ChatRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions, as far as this proxy can honour it."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str = ""
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Bias] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(ChatRequest)


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
    request = decode(_decoder, body)
    _refuse_contradictions(request)
    refuse_unknown_tokens(model, "stop_token_ids", request.stop_token_ids)
    refuse_unknown_tokens(model, "logit_bias", request.logit_bias)
    refuse_other_media(request.messages)
    tools = checked_tools(request.tools or [])
    choice = _tool_choice(request, tools)
    refuse_tools_without_parser(model, tools, choice)
    return request, _call_of(request, defaults, tools, choice)


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


def refuse_other_media(messages: Sequence[ChatMessage]) -> None:
    """Only text is served.

    Raises:
        RequestRefused: 400, naming the part.
    """
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if part.type != "text" or part.text is None:
                    raise RequestRefused(
                        400,
                        f"content parts of type {part.type!r} are not supported",
                        key=f"messages[{i}].content[{j}].type",
                    )


def checked_tools(raw: Sequence[msgspec.Raw]) -> list[dict[str, Any]]:
    """The function schemas as the client wrote them, once they have been checked.

    Raises:
        RequestRefused: 400, naming what is wrong.
    """
    tools: list[dict[str, Any]] = []
    for i, one in enumerate(raw):
        try:
            msgspec.json.decode(one, type=_Tool)
        except msgspec.ValidationError as error:
            raise refusal_of(str(error), f"tools[{i}]") from error
        tools.append(msgspec.json.decode(one))
    return tools


def _tool_choice(request: ChatRequest, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    asked = request.tool_choice
    mode, name = (None, asked.function.name) if isinstance(asked, _NamedChoice) else (asked, None)
    return tool_choice(tools, mode, name, parallel=request.parallel_tool_calls is not False)


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
    schema = schema_of(request.response_format)
    grammars = {"response_format": schema, "regex": request.regex, "ebnf": request.ebnf}
    refuse_two_grammars(grammars, choice)
    return SamplingParams(
        temperature=either(request.temperature, defaults.temperature),
        max_new_tokens=request.max_completion_tokens or request.max_tokens or 0,
        top_p=either(request.top_p, defaults.top_p),
        top_k=either(request.top_k, defaults.top_k) or -1,
        min_p=request.min_p or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=either(request.repetition_penalty, 1.0),
        stop=[text for text in stop or () if text] or None,
        stop_token_ids=request.stop_token_ids or None,
        sampling_seed=request.seed,
        logit_bias=request.logit_bias or None,
        json_schema=schema,
        regex=request.regex,
        ebnf=request.ebnf,
    )


def schema_of(form: ResponseFormat | None) -> str | None:
    """The schema that the reply must follow, as JSON."""
    if form is None or form.type == "text":
        return None
    return json_schema(form.json_schema.schema if form.json_schema else {"type": "object"})
