"""OpenAI Chat Completions. SGLang uses `seed` when it runs deterministically."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.streaming import RecordedReply, ReplyChunk
from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.dialects.hints import Hint, list_ignored_params
from areal_hpc.proxy.dialects.openai.format import ChoiceExchange, format_error, format_logprobs
from areal_hpc.proxy.dialects.openai.sampling import (
    SharedCompletionParams,
    build_sampling_params,
    check_shared_params,
)
from areal_hpc.proxy.dialects.validation import (
    MAX_TOP_LOGPROBS,
    PositiveParam,
    ToolName,
    build_effort_variables,
    decode_json,
    parse_tool_choice,
)
from areal_hpc.proxy.engine.generation import Generation, TokenChunk
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.engine.reply import format_tool_call
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import Message
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


class _NamedToolChoice(Struct, forbid_unknown_fields=True):
    function: _NamedFunction
    type: Literal["function"] = "function"


class _FunctionSchema(Struct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChatTool(Struct):
    function: _FunctionSchema
    type: Literal["function"] = "function"


class ChatRequest(SharedCompletionParams, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions, as far as this proxy can honor it."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: PositiveParam | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedToolChoice | None = None
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


def _build_model_call(
    request: ChatRequest, defaults: SamplingDefaults, model: ServedModel
) -> ModelCall:
    check_shared_params(request, model)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ProxyRequestError(
            400,
            f"max_tokens {request.max_tokens} and max_completion_tokens "
            f"{request.max_completion_tokens} contradict each other",
            key="max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise ProxyRequestError(400, "top_logprobs needs logprobs", key="top_logprobs")
    messages, tools = normalize_messages(request.messages), validate_tools(request.tools)
    asked = request.tool_choice
    mode = asked if isinstance(asked, str) else None
    name = asked.function.name if isinstance(asked, _NamedToolChoice) else None
    parallel = request.parallel_tool_calls is not False
    choice = parse_tool_choice(model, tools, mode, name, parallel=parallel)
    limit = request.max_completion_tokens or request.max_tokens or 0
    ignored = [*list_ignored_params(request)]
    effort = build_effort_variables(request.reasoning_effort, model, "reasoning_effort", ignored)
    return ModelCall(
        messages=messages,
        tools=tools if choice.mode != "none" else None,
        tool_choice=choice,
        variables={**effort, **(request.chat_template_kwargs or {})} or None,
        sampling=build_sampling_params(request, defaults, choice, limit),
        n=request.n or 1,
        top_logprobs=request.top_logprobs or 0,
        ignored=ignored,
    )


def normalize_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """The messages in normal form.

    Raises:
        ProxyRequestError: 400, naming a part that is no text: nothing else is served.
    """
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "text" or part.text is None:
                raise ProxyRequestError(
                    400,
                    f"content parts of type {part.type!r} are not supported",
                    key=f"messages[{i}].content[{j}].type",
                )
    return [normalize_chat_message(msgspec.to_builtins(one)) for one in messages]


def validate_tools(raw: Sequence[msgspec.Raw] | None) -> list[dict[str, Any]]:
    """The function schemas as the client wrote them, once they have been checked.

    Raises:
        ProxyRequestError: 400, naming what is wrong.
    """
    for i, one in enumerate(raw or ()):
        decode_json(one, _ChatTool, f"tools[{i}]")
    return [msgspec.json.decode(one) for one in raw or ()]


class _ChatExchange(ChoiceExchange):
    """A ChatCompletion that is asked for."""

    def __init__(self, request: ChatRequest, session: Session, model: ServedModel) -> None:
        call = _build_model_call(request, session.request.sampling, model)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(request, call, model, "chatcmpl-", kind)
        if request.wants_stream_usage:
            self.frame["usage"] = None
        self._with_logprobs = bool(request.logprobs)
        self._begun: set[int] = set()

    def format_choice(self, answer: RecordedReply) -> dict[str, Any]:
        said = answer.said
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["content"] = said.text or None
            message["tool_calls"] = [
                format_tool_call(call.call_id, call.name, call.arguments) for call in said.calls
            ]
        return {
            "index": answer.choice,
            "finish_reason": answer.finish_reason,
            "logprobs": self._format_logprobs(answer.generation),
            "message": message,
        }

    def format_delta(self, delta: ReplyChunk) -> bytes:
        said, chunks = delta.said, [self._format_first_chunk(delta.choice)]
        logprobs = self._format_logprobs(delta.piece) if delta.piece.output_ids else None
        if said.text or said.reasoning or logprobs is not None:
            fields = {"reasoning_content": said.reasoning, "content": said.text}
            given = {name: text for name, text in fields.items() if text}
            chunks.append(self._format_chunk(delta.choice, given, logprobs=logprobs))
        for call in said.calls:  # one a chunk, as OpenAI does: some clients read no second
            part: dict[str, Any] = {"function": {"arguments": call.arguments}}
            if call.call_id:
                part = format_tool_call(call.call_id, call.name, call.arguments)
            calls = [{"index": call.index, **part}]
            chunks.append(self._format_chunk(delta.choice, {"tool_calls": calls}))
        return b"".join(chunks)

    def format_choice_end(self, answer: RecordedReply) -> bytes:
        reason = answer.finish_reason
        return self._format_first_chunk(answer.choice) + self._format_chunk(
            answer.choice, {}, reason
        )

    def _format_first_chunk(self, choice: int) -> bytes:
        """The first chunk of a choice, once."""
        if choice in self._begun:
            return b""
        self._begun.add(choice)
        return self._format_chunk(choice, {"role": "assistant", "content": ""})

    def _format_chunk(
        self, choice: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        return self.format_event(
            {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        )

    def _format_logprobs(self, said: Generation | TokenChunk) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": format_logprobs(said, self.model.encoder), "refusal": None}


CHAT_DIALECT = Dialect(ChatRequest, _ChatExchange, format_error)
