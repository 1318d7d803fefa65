"""Dialect of Anthropic's Messages API. Without `max_tokens` the session's limit applies."""

import hashlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import PromptTooLongError, ProxyRequestError
from areal_hpc.proxy.completion.reply import RecordedChoice, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.dialect import (
    BlockChange,
    BlockSplitter,
    ContentBlock,
    Dialect,
    Exchange,
    format_named_event,
    split_into_blocks,
)
from areal_hpc.proxy.dialects.parameters import (
    EMPTY_VALUES,
    EMPTY_VALUES_OR_ONE,
    IgnoredParam,
    Refusal,
    list_ignored_params,
)
from areal_hpc.proxy.dialects.validation import (
    PositiveParam,
    Probability,
    Temperature,
    ToolName,
    TopK,
    build_function_tool,
    build_reasoning_variables,
    decode_arguments,
    decode_request_json,
    encode_text_schema,
    fill_default,
    filter_out_hosted_tools,
    format_call_as_text,
    format_left_out_part,
    join_user_texts,
    parse_tool_choice,
)
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import (
    ModelCall,
    ReplyContent,
    ServedModel,
    ToolChoice,
    format_tool_call,
)
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message, strip_volatile_lines
from areal_hpc.wire.proxy import SamplingDefaults


class _Text(Struct, tag="text"):
    text: str


class _ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: Any = None
    """Object; a text if a client sends back arguments that are not an object."""


class _Image(Struct, tag="image"):
    pass


class _Document(Struct, tag="document"):
    pass


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text | _Image | _Document] = ""
    is_error: bool | None = None


class _Thinking(Struct, tag="thinking"):
    thinking: str


class _RedactedThinking(Struct, tag="redacted_thinking"):
    """Encrypted reasoning of another model."""


class _InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Text | _ToolUse | _ToolResult | _Thinking | _RedactedThinking]


class _InputToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


PLACEHOLDER_TOOL = "DeferredToolPlaceholder"
"""Claude Code's placeholder for tools that Anthropic's servers look up; calls of it always fail."""


class _InputTool(Struct, forbid_unknown_fields=True):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: IgnoredParam = None
    defer_loading: IgnoredParam = None
    eager_input_streaming: IgnoredParam = None


class _ThinkingConfig(Struct, forbid_unknown_fields=True):
    type: str = "enabled"
    """`enabled`, `disabled`, `adaptive`, or a newer value."""
    budget_tokens: IgnoredParam = None
    """Target of Anthropic's API, not a limit."""
    display: IgnoredParam = None
    """Without effect: the reasoning is always returned in full."""


class _OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(Struct, forbid_unknown_fields=True):
    format: _OutputFormat | None = None
    effort: Any = None


class MessagesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "container": Refusal("let the agent run programs, and offer that as a tool"),
        "functions": Refusal("use tools"),
        "function_call": Refusal("use tool_choice", (*EMPTY_VALUES, "none", "auto")),
        "input": Refusal("use messages, or POST /responses"),
        "logit_bias": Refusal("use POST /chat/completions"),
        "mcp_servers": Refusal("let the agent connect to them and offer their tools"),
        "n": Refusal("send the request n times", EMPTY_VALUES_OR_ONE),
        "prompt": Refusal("use messages, or POST /completions"),
        "response_format": Refusal("use output_config.format"),
        "seed": Refusal("use POST /chat/completions"),
        "stop": Refusal("use stop_sequences"),
    }

    messages: Annotated[list[_InputMessage], Meta(min_length=1)]
    model: str = ""
    max_tokens: PositiveParam | None = None
    system: str | list[_Text] | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    tools: Annotated[list[msgspec.Raw], Meta(extra={"items": _InputTool})] | None = None
    tool_choice: _InputToolChoice | None = None
    thinking: Annotated[dict[str, Any], Meta(extra={"form": _ThinkingConfig})] | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None
    """Older name of `output_config.format`."""
    betas: IgnoredParam = None
    cache_control: IgnoredParam = None
    context_management: IgnoredParam = None
    inference_geo: IgnoredParam = None
    metadata: Any = None
    service_tier: IgnoredParam = None
    speed: IgnoredParam = None


def build_model_call(
    request: MessagesRequest, defaults: SamplingDefaults, model: ServedModel
) -> ModelCall:
    ignored, dropped = [*list_ignored_params(request)], list[str]()
    tools = _parse_tools(request.tools or [], ignored, dropped)
    choice = _parse_tool_choice(request.tool_choice, tools, model)
    form = request.output_config.format if request.output_config else None
    form = form or request.output_format
    prefill, messages = _split_prefill(request.messages)
    return ModelCall(
        messages=[
            *_build_system_message(request.system),
            *join_user_texts(_read_conversation(messages)),
        ],
        tools=tools or None,
        tool_choice=choice,
        template_variables=_build_thinking_variables(request, model, ignored) or None,
        sampling=SamplingParams(
            temperature=fill_default(request.temperature, defaults.temperature),
            max_new_tokens=request.max_tokens or 0,
            top_p=fill_default(request.top_p, defaults.top_p),
            top_k=fill_default(request.top_k, defaults.top_k) or -1,
            stop=[text for text in request.stop_sequences or () if text] or None,
            json_schema=encode_text_schema(form.schema if form else None, choice),
        ),
        ignored=ignored,
        dropped_tools=dropped,
        prefill=prefill,
    )


# Messages ---------------------------------------------------------------------------------------


def _build_system_message(system: str | list[_Text] | None) -> Iterator[Message]:
    blocks = [system] if isinstance(system, str) else [block.text for block in system or ()]
    kept = [text for text in map(strip_volatile_lines, blocks) if text]
    if kept:
        yield normalize_chat_message({"role": "system", "content": "\n".join(kept)})


def _split_prefill(
    messages: Sequence[_InputMessage],
) -> tuple[str | None, Sequence[_InputMessage]]:
    """Split off a last message of the assistant, which is the beginning of the reply."""
    *others, last = messages
    if last.role != "assistant":
        return None, messages
    prefill = _build_assistant_message(last, len(others))
    if prefill.get("tool_calls") or prefill.get("reasoning_content"):
        problem = "a reply can go on from text of the assistant alone"
        raise ProxyRequestError(400, problem, key=f"messages[{len(others)}]")
    text: str = prefill["content"]
    return text, others


def _read_conversation(messages: Sequence[_InputMessage]) -> Iterator[str | Message]:
    """Yield texts of the user, and messages of the others."""
    for i, message in enumerate(messages):
        if message.role == "system":
            yield from _build_system_message(_read_system_texts(message, i))
        elif message.role == "user":
            yield from _read_user_blocks(message, i)
        else:
            yield normalize_chat_message(_build_assistant_message(message, i))


def _read_system_texts(message: _InputMessage, i: int) -> str | list[_Text]:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for j, block in enumerate(message.content):
        if not isinstance(block, _Text):
            raise _build_misplaced_block_error(message, i, j)
        texts.append(block)
    return texts


def _read_user_blocks(message: _InputMessage, i: int) -> Iterator[str | Message]:
    if isinstance(message.content, str):
        yield message.content
        return
    if not message.content:
        yield ""
    for j, block in enumerate(message.content):
        if isinstance(block, _Text):
            yield block.text
        elif isinstance(block, _ToolResult):
            result = {"tool_call_id": block.tool_use_id, "content": _read_tool_result_text(block)}
            yield {"role": "tool", **result}
        else:
            raise _build_misplaced_block_error(message, i, j)


def _read_tool_result_text(block: _ToolResult) -> str:
    parts: Sequence[_Text | _Image | _Document] = (
        [_Text(block.content)] if isinstance(block.content, str) else block.content
    )
    text = "\n".join(
        p.text if isinstance(p, _Text) else format_left_out_part(str(p.__struct_config__.tag))
        for p in parts
    )
    return f"Error: {text}" if block.is_error and "error" not in text.lower() else text


def _build_assistant_message(message: _InputMessage, i: int) -> Message:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    text, reasoning, calls = "", "", []
    for j, block in enumerate(message.content):
        if isinstance(block, _Text):
            text += block.text
        elif isinstance(block, _Thinking):
            reasoning += block.thinking
        elif isinstance(block, _ToolUse):
            arguments = {} if block.input is None else block.input
            calls.append(format_tool_call(block.id, block.name, arguments))
        elif not isinstance(block, _RedactedThinking):
            raise _build_misplaced_block_error(message, i, j)
    fields = {"reasoning_content": reasoning or None, "tool_calls": calls}
    return {"role": "assistant", "content": text, **fields}


def _build_misplaced_block_error(message: _InputMessage, i: int, j: int) -> ProxyRequestError:
    assert not isinstance(message.content, str)
    kind = type(message.content[j]).__struct_config__.tag
    problem = f"a {message.role} message cannot contain a {kind!r} block"
    return ProxyRequestError(400, problem, key=f"messages[{i}].content[{j}].type")


# Tools, sampling --------------------------------------------------------------------------------


def _parse_tools(
    raw_tools: Sequence[msgspec.Raw], ignored: list[str], dropped: list[str]
) -> list[dict[str, Any]]:
    declared: list[_InputTool] = [
        decode_request_json(raw_tool, _InputTool, f"tools[{i}]", ignored)
        for i, raw_tool in filter_out_hosted_tools(raw_tools, dropped)
    ]
    tools = [tool for tool in declared if tool.name != PLACEHOLDER_TOOL]
    dropped += [PLACEHOLDER_TOOL] * (len(tools) < len(declared))
    ignored += sorted({hint for tool in tools for hint in list_ignored_params(tool, "tools[].")})
    return [
        build_function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in tools
    ]


def _parse_tool_choice(
    tool_choice: _InputToolChoice | None, tools: Sequence[dict[str, Any]], model: ServedModel
) -> ToolChoice:
    choice = tool_choice or _InputToolChoice("auto")
    if choice.type == "tool" and choice.name is None:
        raise ProxyRequestError(400, "the tool's name is missing", key="tool_choice.name")
    mode = "required" if choice.type == "any" else choice.type
    name = choice.name if choice.type == "tool" else None
    return parse_tool_choice(
        model, tools, mode, name, parallel=not choice.disable_parallel_tool_use
    )


def _build_thinking_variables(
    request: MessagesRequest, model: ServedModel, ignored: list[str]
) -> dict[str, Any]:
    """Build the chat template's variables for reasoning and its effort."""
    effort = request.output_config.effort if request.output_config else None
    variables = build_reasoning_variables(model, "output_config.effort", ignored, effort=effort)
    if request.thinking is None:
        return variables
    raw = msgspec.json.encode(request.thinking)
    config: _ThinkingConfig = decode_request_json(raw, _ThinkingConfig, "thinking", ignored)
    ignored += list_ignored_params(config, "thinking.")
    thinks = config.type != "disabled"
    return variables | build_reasoning_variables(model, "thinking", ignored, thinks=thinks)


_ERROR_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DELTA_FORMAT_BY_KIND = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class _MessagesExchange(Exchange):
    ping_event = format_named_event({"type": "ping"})

    def __init__(self, request: MessagesRequest, session: Session, model: ServedModel) -> None:
        call = build_model_call(request, session.request.sampling, model)
        super().__init__(call, model, "msg_", request.stream)
        self._frame: dict[str, Any] = {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        (answer,) = answers
        blocks = split_into_blocks(_move_invalid_calls_to_text(answer.content))
        content = [_format_block(block) for block in blocks]
        ending = {**_build_stop_fields(answer, blocks), "usage": _format_usage(answer)}
        return msgspec.json.encode({**self._frame, "content": content, **ending})

    async def stream_events(self, reply_stream: ReplyStream) -> AsyncGenerator[bytes, None]:
        splitter = BlockSplitter()
        usage = {"input_tokens": reply_stream.prompt_tokens, "output_tokens": 0}
        message = {**self._frame, "usage": usage}
        beginning = format_named_event({"type": "message_start", "message": message})
        async for event in reply_stream:
            if isinstance(event, ReplyChunk):
                yield beginning + _format_block_changes(
                    splitter.add_delta(_move_invalid_calls_to_text(event.content))
                )
            else:
                rest = _format_block_changes(splitter.finish())
                delta = _build_stop_fields(event, splitter.blocks)
                ending = {"type": "message_delta", "delta": delta, "usage": _format_usage(event)}
                stop = {"type": "message_stop"}
                yield beginning + rest + format_named_event(ending) + format_named_event(stop)
            beginning = b""

    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        return format_named_event(_build_error_fields(refusal))


def _move_invalid_calls_to_text(reply: ReplyContent) -> ReplyContent:
    invalid = [call for call in reply.calls if decode_arguments(call.arguments) is None]
    if not invalid:
        return reply
    text = "".join(format_call_as_text(call.name, call.arguments) for call in invalid)
    calls = [call for call in reply.calls if call not in invalid]
    return ReplyContent(reply.text + text, reply.reasoning, calls)


def _format_block(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        signature = _make_reasoning_signature(block)
        return {"type": "thinking", "thinking": block.text, "signature": signature}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    tool_use = {"type": "tool_use", "id": block.call_id, "name": block.name}
    return {**tool_use, "input": msgspec.Raw(block.text.encode())}


def _make_reasoning_signature(block: ContentBlock) -> str:
    return hashlib.blake2b(block.text.encode(), digest_size=16).hexdigest()


def _format_block_changes(changes: Iterable[BlockChange]) -> bytes:
    events: list[dict[str, Any]] = []
    for kind, block, text in changes:
        start = {"type": "content_block_start", "index": block.index}
        delta = {"type": "content_block_delta", "index": block.index}
        if kind == "begin":
            events.append({**start, "content_block": _format_block_start(block)})
        elif kind == "add":
            delta_type, field = _DELTA_FORMAT_BY_KIND[block.kind]
            events.append({**delta, "delta": {"type": delta_type, field: text}})
        else:
            if block.kind == "reasoning":
                signature = _make_reasoning_signature(block)
                signed = {"type": "signature_delta", "signature": signature}
                events.append({**delta, "delta": signed})
            events.append({"type": "content_block_stop", "index": block.index})
    return b"".join(map(format_named_event, events))


def _format_block_start(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _build_stop_fields(answer: RecordedChoice, blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    reason, sequence = "end_turn", None
    if answer.generation.finish_reason == "length":
        reason = "max_tokens"
    elif any(block.kind == "call" for block in blocks):
        reason = "tool_use"
    elif answer.generation.stop_text is not None:
        reason, sequence = "stop_sequence", answer.generation.stop_text
    return {"stop_reason": reason, "stop_sequence": sequence}


def _format_usage(answer: RecordedChoice) -> dict[str, Any]:
    cached_tokens = answer.generation.cached_tokens
    return {
        "input_tokens": answer.interaction.prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": len(answer.generation.output_ids),
    }


def _build_error_fields(refusal: ProxyRequestError) -> dict[str, Any]:
    default = "api_error" if refusal.status >= 500 else "invalid_request_error"
    message = f"{refusal.param}: {refusal.message}" if refusal.param else refusal.message
    if isinstance(refusal, PromptTooLongError):  # Claude Code looks for exactly these words
        most_tokens = min(refusal.context_tokens, refusal.prompt_tokens - 1)  # a reply has one
        message = f"prompt is too long: {refusal.prompt_tokens} tokens > {most_tokens} maximum"
    kind = _ERROR_TYPE_BY_STATUS.get(refusal.status, default)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _format_error(refusal: ProxyRequestError) -> bytes:
    return msgspec.json.encode(_build_error_fields(refusal))


MESSAGES_DIALECT = Dialect(MessagesRequest, _MessagesExchange, _format_error)
