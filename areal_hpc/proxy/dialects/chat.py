"""OpenAI Chat Completions: request -> `ModelCall`, answers -> response.

Every parameter is honoured or refused by name. Accepted without effect are those that promise
none here: `user`, `metadata`, `safety_identifier`, `prompt_cache_key` (labels and hints) and
`model` (a cell serves one model, whatever name an agent has for it). `seed` is passed on; SGLang
uses it when it runs deterministically.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from areal_hpc.proxy.calls import Answer, ModelCall
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.upstream import SamplingParams
from areal_hpc.session.normalise import normalise_chat_message
from areal_hpc.session.template import TokenEncoder
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


class _ResponseFormat(Struct):
    type: str


Positive = Annotated[int, Meta(ge=1)]
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
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
    chat_template_kwargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(ChatRequest)
_AT_PARAMETER = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"(unknown|missing required) field `([^`]+)`")


def parse(
    body: bytes, defaults: SamplingDefaults, vocab_size: int
) -> tuple[ChatRequest, ModelCall]:
    """Validate a request.

    Args:
        body: As received.
        defaults: Apply where the request is silent.
        vocab_size: Token ids in the request must be below it.

    Raises:
        RequestRefused: 400, naming the parameter that is wrong or cannot be honoured.
    """
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal_of(str(error)) from error
    except msgspec.DecodeError as error:
        raise RequestRefused(400, f"the body is not JSON: {error}") from error
    _refuse_unsupported(request, vocab_size)
    return request, _call_of(request, defaults)


def _refusal_of(complaint: str) -> RequestRefused:
    where = _AT_PARAMETER.search(complaint)
    key = where[1] if where else ""
    named = _FIELD.search(complaint)
    if named and named[1] == "unknown" and not key:
        return RequestRefused(400, f"the parameter {named[2]!r} is not supported", key=named[2])
    if named:
        key = f"{key}.{named[2]}" if key else named[2]
    return RequestRefused(400, complaint, key=key)


def _refuse_unsupported(request: ChatRequest, vocab_size: int) -> None:
    if request.stream:
        raise RequestRefused(400, "streaming is not supported yet", key="stream")
    if request.tools:
        raise RequestRefused(400, "no tool-call parser is configured", key="tools")
    if request.tool_choice not in (None, "none", "auto"):
        raise RequestRefused(400, "there are no tools to choose from", key="tool_choice")
    if request.response_format is not None and request.response_format.type != "text":
        raise RequestRefused(
            400,
            f"response_format {request.response_format.type!r} is not supported yet",
            key="response_format",
        )
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
    if any(not 0 <= token < vocab_size for token in request.stop_token_ids or ()):
        raise RequestRefused(400, f"token ids are below {vocab_size}", key="stop_token_ids")
    for i, message in enumerate(request.messages):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if part.type != "text" or part.text is None:
                    raise RequestRefused(
                        400,
                        f"content parts of type {part.type!r} are not supported",
                        key=f"messages[{i}].content[{j}].type",
                    )


def _call_of(request: ChatRequest, defaults: SamplingDefaults) -> ModelCall:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    limit = request.max_completion_tokens or request.max_tokens or 0
    sampling = SamplingParams(
        temperature=_either(request.temperature, defaults.temperature),
        max_new_tokens=limit,
        top_p=_either(request.top_p, defaults.top_p),
        top_k=_either(request.top_k, defaults.top_k) or -1,
        min_p=request.min_p or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=_either(request.repetition_penalty, 1.0),
        stop=[text for text in stop or () if text] or None,
        stop_token_ids=request.stop_token_ids or None,
        sampling_seed=request.seed,
    )
    return ModelCall(
        messages=[
            normalise_chat_message(msgspec.to_builtins(message)) for message in request.messages
        ],
        tools=request.tools or None,
        variables=request.chat_template_kwargs or None,
        sampling=sampling,
        max_tokens_key="max_tokens" if request.max_tokens else "max_completion_tokens",
        n=request.n or 1,
        top_logprobs=request.top_logprobs or 0,
    )


def _either(asked: Given | None, default: Given) -> Given:
    return default if asked is None else asked


def response(
    answer_id: str, model: str, request: ChatRequest, answers: list[Answer], encoder: TokenEncoder
) -> bytes:
    """The JSON body of a ChatCompletion."""
    completion_tokens = sum(len(answer.generation.output_ids) for answer in answers)
    prompt_tokens = answers[0].interaction.prompt_tokens
    return msgspec.json.encode(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                _choice(index, request, answer, encoder) for index, answer in enumerate(answers)
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": answers[0].generation.cached_tokens},
            },
        }
    )


def _choice(
    index: int, request: ChatRequest, answer: Answer, encoder: TokenEncoder
) -> dict[str, Any]:
    generation = answer.generation
    logprobs = None
    if request.logprobs:
        logprobs = {"content": _token_logprobs(answer, encoder), "refusal": None}
    return {
        "index": index,
        "finish_reason": generation.finish_reason,
        "logprobs": logprobs,
        "message": {"role": "assistant", "content": generation.text, "refusal": None},
    }


def _token_logprobs(answer: Answer, encoder: TokenEncoder) -> list[Mapping[str, Any]]:
    generation = answer.generation
    tops = generation.top_logprobs or [None] * len(generation.output_ids)
    return [
        {
            **_token(token, logprob, encoder),
            "top_logprobs": [_token(other, value, encoder) for value, other, _ in top or ()],
        }
        for token, logprob, top in zip(
            generation.output_ids, generation.logprobs, tops, strict=True
        )
    ]


def _token(token: int, logprob: float, encoder: TokenEncoder) -> dict[str, Any]:
    text = encoder.decode([token])
    # A token that is part of a character has no text of its own.
    utf8 = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": utf8}


def models(model: str, context_tokens: int) -> bytes:
    """The JSON body of GET /v1/models."""
    card = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "areal_hpc",
        "max_model_len": context_tokens,
    }
    return msgspec.json.encode({"object": "list", "data": [card]})


def error(refusal: RequestRefused) -> bytes:
    """A refusal in OpenAI's shape."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    default = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return msgspec.json.encode(
        {
            "error": {
                "message": refusal.message,
                "type": kinds.get(refusal.status, default),
                "param": refusal.param,
                "code": None,
            }
        }
    )
