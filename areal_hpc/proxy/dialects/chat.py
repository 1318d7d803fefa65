"""Dialect of OpenAI's Chat Completions. SGLang uses `seed` only in its deterministic mode."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.reply import RecordedChoice, ReplyChunk
from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.dialects.openai import (
    ChoiceExchange,
    SharedCompletionParams,
    build_sampling_params,
    check_shared_params,
    format_error,
    format_logprobs,
    list_all_ignored_params,
)
from areal_hpc.proxy.dialects.parameters import IgnoredParam, Refusal
from areal_hpc.proxy.dialects.validation import (
    MAX_TOP_LOGPROBS,
    CustomFormat,
    PositiveParam,
    ToolName,
    TypedObject,
    build_custom_tool_schema,
    build_function_tool,
    build_reasoning_variables,
    decode_request_json,
    encode_custom_input,
    filter_out_hosted_tools,
    format_left_out_part,
    parse_tool_choice,
    read_custom_input,
)
from areal_hpc.proxy.engine.generation import Generation, TokenChunk
from areal_hpc.proxy.engine.model_call import (
    ModelCall,
    ReplyToolCall,
    ServedModel,
    ToolChoice,
    format_tool_call,
)
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import build_normal_message
from areal_hpc.wire.decoding import decode_json


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _CalledFunction(Struct):
    name: str
    arguments: Any = ""
    """JSON as text; an object if a client has decoded it."""


class _CalledCustomTool(Struct):
    name: str
    input: str = ""


class ToolCall(Struct):
    function: _CalledFunction | None = None
    custom: _CalledCustomTool | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: _CalledFunction | None = None
    """OpenAI's older form of a call, whose result is a message of role `function`."""
    prefix: bool | None = None
    """Whether the reply continues the text of this last message, of the assistant."""
    audio: dict[str, Any] | None = None
    """Speech, which is refused."""
    annotations: IgnoredParam = None
    cache_control: IgnoredParam = None
    images: IgnoredParam = None
    provider_specific_fields: IgnoredParam = None
    reasoning: IgnoredParam = None
    reasoning_details: IgnoredParam = None
    refusal: IgnoredParam = None
    thinking_blocks: IgnoredParam = None


class _NamedTool(Struct):
    name: str


class _NamedToolOfKind(Struct):
    function: _NamedTool | None = None
    custom: _NamedTool | None = None


class _AllowedTools(Struct, forbid_unknown_fields=True):
    tools: list[_NamedToolOfKind]
    mode: Literal["auto", "required"] = "auto"


class _ToolChoiceObject(Struct, forbid_unknown_fields=True):
    function: _NamedTool | None = None
    custom: _NamedTool | None = None
    allowed_tools: _AllowedTools | None = None
    type: Literal["function", "custom", "allowed_tools"] = "function"


class _FunctionSchema(Struct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChatTool(Struct):
    function: _FunctionSchema
    type: Literal["function"] = "function"


class _Grammar(Struct):
    syntax: Literal["lark", "regex"]
    definition: str


class _CustomToolFormat(Struct):
    type: Literal["text", "grammar"] = "text"
    grammar: _Grammar | None = None


class _CustomToolSchema(Struct):
    name: ToolName
    description: str | None = None
    format: _CustomToolFormat = msgspec.field(default_factory=_CustomToolFormat)


class _CustomTool(Struct):
    custom: _CustomToolSchema
    type: Literal["custom"] = "custom"


class _Reasoning(Struct):
    effort: Any = None
    enabled: bool | None = None


class _Thinking(Struct):
    type: str = ""


class ChatRequest(SharedCompletionParams, forbid_unknown_fields=True, kw_only=True):
    refused: ClassVar[Mapping[str, Refusal]] = {
        **SharedCompletionParams.refused,
        "add_special_tokens": Refusal("the chat template writes them"),
        "audio": Refusal("replies are text"),
        "documents": Refusal("write them into messages"),
        "echo": Refusal("put the messages before the reply yourself"),
        "mcp_servers": Refusal("let the agent connect to them and offer their tools"),
        "prompt": Refusal("use messages, or POST /completions"),
        "suffix": Refusal("the model goes on from messages; it fills no gaps"),
        "web_search_options": Refusal("offer a function that searches"),
    }

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: PositiveParam | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[msgspec.Raw], Meta(extra={"items": _ChatTool})] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolChoiceObject | None = None
    functions: list[_FunctionSchema] | None = None
    """OpenAI's older form of `tools`, with `function_call` as the choice."""
    function_call: Literal["none", "auto"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template (SGLang, vLLM)."""
    reasoning_effort: Any = None
    reasoning: _Reasoning | None = None
    """OpenRouter's form of the effort."""
    enable_thinking: bool | None = None
    """Qwen's parameter; `thinking` is DeepSeek's."""
    thinking: _Thinking | None = None
    continue_final_message: bool | None = None
    """Whether the reply continues the last message (vLLM)."""
    add_generation_prompt: bool | None = None
    """vLLM's parameter, which is false together with `continue_final_message`."""
    metadata: Any = None
    prediction: IgnoredParam = None
    prompt_cache_key: Any = None
    prompt_cache_retention: IgnoredParam = None
    safety_identifier: IgnoredParam = None
    service_tier: IgnoredParam = None
    store: IgnoredParam = None
    verbosity: IgnoredParam = None

    @property
    def has_old_functions(self) -> bool:
        return not self.tools and (self.functions or self.function_call) is not None

    def get_custom_tool_names(self) -> frozenset[str]:
        if not any(b'"custom"' in bytes(raw_tool) for raw_tool in self.tools or ()):
            return frozenset()
        tools = [decode_json(raw_tool, _NamedToolOfKind) for raw_tool in self.tools or ()]
        return frozenset(tool.custom.name for tool in tools if tool.custom is not None)


def _build_model_call(request: ChatRequest, session: Session, model: ServedModel) -> ModelCall:
    check_shared_params(request, model)
    limits = request.max_tokens, request.max_completion_tokens
    if None not in limits and limits[0] != limits[1]:
        raise ProxyRequestError(
            400,
            f"max_tokens {request.max_tokens} and max_completion_tokens "
            f"{request.max_completion_tokens} contradict each other",
            key="max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise ProxyRequestError(400, "top_logprobs needs logprobs", key="top_logprobs")
    prefill, messages = _split_prefill(request)
    ignored, dropped = list_all_ignored_params(request), list[str]()
    tools, choice = _read_tools(request, model, ignored, dropped)
    limit = request.max_completion_tokens or request.max_tokens or 0
    return ModelCall(
        messages=session.latest_messages.normalize(messages, normalize_message),
        tools=tools or None,
        tool_choice=choice,
        template_variables={
            **_build_thinking_variables(request, model, ignored),
            **(request.chat_template_kwargs or {}),
        }
        or None,
        sampling=build_sampling_params(request, session.request.sampling, choice, limit),
        n=request.n or 1,
        top_logprobs=request.top_logprobs or 0,
        ignored=ignored,
        dropped_tools=dropped,
        prefill=prefill,
    )


def _split_prefill(request: ChatRequest) -> tuple[str | None, list[ChatMessage]]:
    """Split off a last message that the reply shall continue."""
    last = request.messages[-1]
    if not (request.continue_final_message or last.prefix):
        if request.add_generation_prompt is False:
            problem = "a reply begins with its opening, or goes on from a message"
            hint = "set continue_final_message"
            raise ProxyRequestError(400, problem, key="add_generation_prompt", hint=hint)
        return None, request.messages
    others = request.messages[:-1]
    key = f"messages[{len(others)}]"
    if last.role != "assistant" or last.tool_calls or last.function_call or last.reasoning_content:
        raise ProxyRequestError(400, "a reply can go on from text of the assistant alone", key=key)
    text: str = normalize_message(last, len(others))["content"]
    return text, others


def normalize_message(message: ChatMessage, i: int) -> Message:
    if message.audio:
        problem = "speech is not supported"
        raise ProxyRequestError(400, problem, key=f"messages[{i}].audio", hint="send its text")
    content = message.content or ""
    if not isinstance(content, str):
        is_result = message.role in ("tool", "function")
        content = "\n".join(
            format_left_out_part(part.type)
            if is_result and part.type in _UNREAD_PART_TYPES
            else _read_text_part(part, i, j)
            for j, part in enumerate(content)
        )
    calls: list[dict[str, Any]] = []
    if message.tool_calls:
        calls += (
            {"id": call.id, "function": read_call(call, f"messages[{i}].tool_calls[{j}]")}
            for j, call in enumerate(message.tool_calls)
        )
    if message.function_call is not None:
        function = message.function_call
        calls.append({"function": {"name": function.name, "arguments": function.arguments}})
    return build_normal_message(
        "tool" if message.role == "function" else message.role,
        content,
        message.name,
        message.tool_call_id,
        message.reasoning_content,
        calls,
    )


def read_call(call: ToolCall, key: str) -> dict[str, Any]:
    """Return the name and arguments of a call; a custom tool is a function of one text."""
    if call.custom is not None:
        return {"name": call.custom.name, "arguments": encode_custom_input(call.custom.input)}
    if call.function is None:
        problem = "a tool call needs a function or a custom tool"
        raise ProxyRequestError(400, problem, key=key)
    return {"name": call.function.name, "arguments": call.function.arguments}


_UNREAD_PART_TYPES = ("image_url", "input_audio", "file")


def _read_text_part(part: ContentPart, i: int, j: int) -> str:
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is None:
        problem = f"content parts of type {part.type!r} are not supported"
        raise ProxyRequestError(400, problem, key=f"messages[{i}].content[{j}].type")
    return text


def _read_tools(
    request: ChatRequest, model: ServedModel, ignored: list[str], dropped: list[str]
) -> tuple[list[dict[str, Any]], ToolChoice]:
    mode: str | None
    if request.tools and request.functions:
        problem = "functions are the older form of tools"
        raise ProxyRequestError(400, problem, key="functions", hint="offer all as tools")
    if request.has_old_functions:
        tools = [
            build_function_tool(f.name, f.description, f.parameters, f.strict)
            for f in request.functions or ()
        ]
        old_choice = request.function_call
        mode = old_choice if isinstance(old_choice, str) else None
        name = old_choice.name if isinstance(old_choice, _NamedTool) else None
        return tools, parse_tool_choice(model, tools, mode, name, parallel=False)
    tools = build_tool_schemas(request.tools, ignored, dropped) if request.tools else []
    parallel = request.parallel_tool_calls is not False
    if not tools and request.tool_choice is None:
        return tools, ToolChoice("none", None, parallel)
    choice, mode, name, allowed = request.tool_choice, None, None, list[str]()
    if not isinstance(choice, _ToolChoiceObject):
        mode = choice
    elif choice.allowed_tools is not None:
        items = choice.allowed_tools.tools
        allowed = [tool.name for item in items if (tool := item.function or item.custom)]
        mode = choice.allowed_tools.mode if allowed else "none"
    elif chosen := choice.function or choice.custom:
        name = chosen.name
    return tools, parse_tool_choice(
        model, tools, mode, name, parallel=parallel, allowed_names=allowed
    )


def build_tool_schemas(
    raw_tools: Sequence[msgspec.Raw] | None, ignored: list[str], dropped: list[str]
) -> list[dict[str, Any]]:
    """Check the tools of a request; return the function schemas as the client wrote them.

    Hints in them are added to `ignored`, types of tools that are left out to `dropped`.
    """
    schemas, hints = list[dict[str, Any]](), set[str]()
    for i, raw in filter_out_hosted_tools(raw_tools or (), dropped):
        if decode_request_json(raw, TypedObject, f"tools[{i}]").type == "custom":
            tool: _CustomToolSchema = decode_request_json(raw, _CustomTool, f"tools[{i}]").custom
            form, grammar = CustomFormat(), tool.format.grammar
            if grammar is not None:
                form = CustomFormat("grammar", grammar.syntax, grammar.definition)
            schemas.append(build_custom_tool_schema(tool.name, tool.description, form, hints))
        else:
            decode_request_json(raw, _ChatTool, f"tools[{i}]")
            schemas.append(msgspec.json.decode(raw))
    ignored += sorted(hints)
    return schemas


def _build_thinking_variables(
    request: ChatRequest, model: ServedModel, ignored: list[str]
) -> dict[str, Any]:
    variables: dict[str, Any] = {}

    def add(key: str, *, effort: Any = None, thinks: bool | None = None) -> None:
        if effort is not None or thinks is not None:
            variables.update(
                build_reasoning_variables(model, key, ignored, effort=effort, thinks=thinks)
            )

    add("reasoning_effort", effort=request.reasoning_effort)
    if request.reasoning is not None:
        add("reasoning.effort", effort=request.reasoning.effort)
    add("enable_thinking", thinks=request.enable_thinking)
    if request.reasoning is not None:
        add("reasoning.enabled", thinks=request.reasoning.enabled)
    if request.thinking is not None:
        add("thinking", thinks=request.thinking.type != "disabled")
    return variables


class _ChatExchange(ChoiceExchange):
    def __init__(self, request: ChatRequest, session: Session, model: ServedModel) -> None:
        call = _build_model_call(request, session, model)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(request, call, session, model, "chatcmpl-", kind)
        if request.wants_stream_usage:
            self.frame["usage"] = None
        self._with_logprobs = bool(request.logprobs)
        self._has_old_functions = request.has_old_functions
        self._custom_tools = request.get_custom_tool_names()
        self._custom_calls: set[tuple[int, int]] = set()
        """Choice and index of the begun calls of custom tools."""
        self._begun: set[int] = set()

    def format_choice(self, answer: RecordedChoice) -> dict[str, Any]:
        content = answer.content
        message: dict[str, Any] = {"role": "assistant", "content": content.text, "refusal": None}
        if content.reasoning:
            message["reasoning_content"] = content.reasoning
        if content.calls:
            message["content"] = content.text or None
            if self._has_old_functions:
                first = content.calls[0]
                message["function_call"] = {"name": first.name, "arguments": first.arguments}
            else:
                message["tool_calls"] = [self._format_call(call) for call in content.calls]
        return {
            "index": answer.choice,
            "finish_reason": self._get_finish_reason(answer),
            "logprobs": self._format_logprobs(answer.generation),
            "message": message,
            **self.build_token_id_fields(answer),
        }

    def _format_call(self, call: ReplyToolCall) -> dict[str, Any]:
        if call.name in self._custom_tools:
            custom = {"name": call.name, "input": read_custom_input(call.arguments)}
            return {"id": call.call_id, "type": "custom", "custom": custom}
        return format_tool_call(call.call_id, call.name, call.arguments)

    def _get_finish_reason(self, answer: RecordedChoice) -> str:
        reason = answer.finish_reason
        return "function_call" if self._has_old_functions and reason == "tool_calls" else reason

    def format_delta(self, delta: ReplyChunk) -> bytes:
        content, chunks = delta.content, [self._format_first_chunk_once(delta.choice)]
        logprobs = self._format_logprobs(delta.tokens)
        logprobs = logprobs if logprobs and logprobs["content"] else None
        if content.text or content.reasoning or logprobs:
            texts = {"reasoning_content": content.reasoning, "content": content.text}
            fields = {name: text for name, text in texts.items() if text}
            chunks.append(self._format_chunk(delta.choice, fields, logprobs=logprobs))
        for call in content.calls:  # one per chunk, as OpenAI does: some clients read no second
            if not self._is_custom_call(delta.choice, call):
                chunks.append(self._format_chunk(delta.choice, self._format_call_delta(call)))
        return b"".join(chunks)

    def _is_custom_call(self, choice_index: int, call: ReplyToolCall) -> bool:
        if call.name in self._custom_tools:
            self._custom_calls.add((choice_index, call.index))
        return (choice_index, call.index) in self._custom_calls

    def _format_call_delta(self, call: ReplyToolCall) -> dict[str, Any]:
        part: dict[str, Any] = {"function": {"arguments": call.arguments}}
        if call.call_id:  # the first part of the call
            part = self._format_call(call)
        if self._has_old_functions:
            return {"function_call": part["function"]}
        return {"tool_calls": [{"index": call.index, **part}]}

    def format_choice_end(self, answer: RecordedChoice) -> bytes:
        ids = self.build_token_id_fields(answer)
        choice = {"index": answer.choice, "delta": {}, "logprobs": None, **ids}
        chunks = [self._format_first_chunk_once(answer.choice)]
        for call in answer.content.calls:
            if call.name in self._custom_tools:
                chunks.append(self._format_chunk(answer.choice, self._format_call_delta(call)))
        end = self.format_event({**choice, "finish_reason": self._get_finish_reason(answer)})
        return b"".join([*chunks, end])

    def _format_first_chunk_once(self, choice_index: int) -> bytes:
        if choice_index in self._begun:
            return b""
        self._begun.add(choice_index)
        return self._format_chunk(choice_index, {"role": "assistant", "content": ""})

    def _format_chunk(
        self, choice_index: int, delta: dict[str, Any], logprobs: Any = None
    ) -> bytes:
        return self.format_event(
            {"index": choice_index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        )

    def _format_logprobs(self, generated: Generation | TokenChunk) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": format_logprobs(generated, self.model.encoder), "refusal": None}


CHAT_DIALECT = Dialect(ChatRequest, _ChatExchange, format_error)
