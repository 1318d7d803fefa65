"""OpenAI Chat Completions requests.

Every parameter is honoured, accepted without effect because it is a hint (`hints`), or refused by
name. `model` is any name: a cell serves one model, whatever an agent calls it. `seed` is passed on;
SGLang uses it when it runs deterministically.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import RequestError
from areal_hpc.proxy.dialects.hints import Hint, hints_in
from areal_hpc.proxy.dialects.openai.sampling import (
    CompletionSampling,
    build_sampling_params,
    check_consistency,
)
from areal_hpc.proxy.dialects.validation import (
    FunctionSchema,
    PositiveParam,
    check_tools_supported,
    decode,
    decode_part,
    effort_variables,
    parse_tool_choice,
)
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.wire.proxy import SamplingDefaults


class _TextPart(Struct):
    type: str
    text: str | None = None


class _CalledFunction(Struct):
    name: str
    arguments: str


class _ToolCall(Struct):
    function: _CalledFunction
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


class _NamedFunction(Struct):
    name: str


class _ChatToolChoice(Struct, forbid_unknown_fields=True):
    function: _NamedFunction
    type: Literal["function"] = "function"


class _ChatTool(Struct):
    function: FunctionSchema
    type: Literal["function"] = "function"


class ChatRequest(CompletionSampling, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions, as far as this proxy can honour it."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: PositiveParam | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Any = None
    metadata: Hint = None
    prediction: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    service_tier: Hint = None
    store: Hint = None
    verbosity: Hint = None
    # Beyond OpenAI, under SGLang's name:
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
        RequestError: 400, naming the parameter that is wrong or cannot be honoured.
    """
    request = decode(_decoder, body)
    check_consistency(request, model)
    _refuse_contradictions(request)
    require_text_only(request.messages)
    tools = validate_tools(request.tools or [])
    choice = _tool_choice(request, tools)
    check_tools_supported(model, tools, choice)
    return request, _call_of(request, defaults, model, tools, choice)


def _refuse_contradictions(request: ChatRequest) -> None:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError(
            400,
            f"max_tokens {request.max_tokens} and max_completion_tokens "
            f"{request.max_completion_tokens} contradict each other",
            key="max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs", key="top_logprobs")


def require_text_only(messages: Sequence[ChatMessage]) -> None:
    """Only text is served.

    Raises:
        RequestError: 400, naming the part.
    """
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if part.type != "text" or part.text is None:
                    raise RequestError(
                        400,
                        f"content parts of type {part.type!r} are not supported",
                        key=f"messages[{i}].content[{j}].type",
                    )


def validate_tools(raw: Sequence[msgspec.Raw]) -> list[dict[str, Any]]:
    """The function schemas as the client wrote them, once they have been checked.

    Raises:
        RequestError: 400, naming what is wrong.
    """
    tools: list[dict[str, Any]] = []
    for i, one in enumerate(raw):
        decode_part(one, _ChatTool, f"tools[{i}]")
        tools.append(msgspec.json.decode(one))
    return tools


def _tool_choice(request: ChatRequest, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    asked = request.tool_choice
    mode, name = (
        (None, asked.function.name) if isinstance(asked, _ChatToolChoice) else (asked, None)
    )
    return parse_tool_choice(tools, mode, name, parallel=request.parallel_tool_calls is not False)


def _call_of(
    request: ChatRequest,
    defaults: SamplingDefaults,
    model: ServedModel,
    tools: list[dict[str, Any]],
    choice: ToolChoice,
) -> ModelCall:
    limit = request.max_completion_tokens or request.max_tokens or 0
    effort = effort_variables(request.reasoning_effort, model)
    ignored = [*hints_in(request)]
    if request.reasoning_effort is not None and effort is None:
        ignored.append("reasoning_effort")
    return ModelCall(
        messages=[normalize_chat_message(msgspec.to_builtins(one)) for one in request.messages],
        tools=tools if choice.mode != "none" else None,
        tool_choice=choice,
        variables={**(effort or {}), **(request.chat_template_kwargs or {})} or None,
        sampling=build_sampling_params(request, defaults, choice, limit),
        n=request.n or 1,
        top_logprobs=request.top_logprobs or 0,
        ignored=ignored,
    )
