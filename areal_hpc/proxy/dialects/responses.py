"""Dialect of OpenAI's Responses API.

`store` decides whether the reply can be retrieved; a session records every reply. Reasoning is
returned as plain text, and read from such items of later requests.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
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
from areal_hpc.proxy.dialects.openai import (
    format_error,
    format_error_fields,
    format_logprobs,
)
from areal_hpc.proxy.dialects.parameters import (
    EMPTY_VALUES,
    EMPTY_VALUES_OR_ONE,
    IgnoredParam,
    Refusal,
    list_ignored_params,
)
from areal_hpc.proxy.dialects.responses_items import (
    ID_PREFIX_WITH_INSTRUCTIONS,
    ID_PREFIX_WITHOUT_INSTRUCTIONS,
    AnyTool,
    InputItem,
    OfferedTools,
    build_item_id,
    build_messages,
    format_content_part,
    format_item,
    format_usage,
    is_custom_call,
    parse_tools,
    resolve_references,
)
from areal_hpc.proxy.dialects.validation import (
    MAX_TOP_LOGPROBS,
    PositiveParam,
    Probability,
    Temperature,
    build_reasoning_variables,
    encode_text_schema,
    fill_default,
    parse_tool_choice,
)
from areal_hpc.proxy.engine.generation import Generation, SamplingParams, TokenChunk
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import Message
from areal_hpc.session.open_turn import RAW_PROMPT_CONTEXT

LOGPROBS_INCLUDE = "message.output_text.logprobs"


class _NamedToolChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str


class _CustomToolChoice(_NamedToolChoice, tag="custom"):
    pass


class _AllowedTool(Struct):
    name: str | None = None
    """Name of the tool; None for tools that a provider's servers run."""
    type: str = "function"


class _AllowedToolChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    tools: list[_AllowedTool]
    mode: Literal["auto", "required"] = "auto"


_ToolChoiceObject = _NamedToolChoice | _CustomToolChoice | _AllowedToolChoice


class _TextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _TextConfig(Struct, forbid_unknown_fields=True):
    format: _TextFormat = msgspec.field(default_factory=_TextFormat)
    verbosity: IgnoredParam = None


class _Reasoning(Struct, forbid_unknown_fields=True):
    effort: Any = None
    summary: IgnoredParam = None
    generate_summary: IgnoredParam = None


class ResponsesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "background": Refusal("wait for the reply, or stream it"),
        "conversation": Refusal("use previous_response_id"),
        "functions": Refusal("use tools"),
        "function_call": Refusal("use tool_choice", (*EMPTY_VALUES, "none", "auto")),
        "logit_bias": Refusal("use POST /chat/completions"),
        "messages": Refusal("use input, or POST /chat/completions"),
        "n": Refusal("send the request n times", EMPTY_VALUES_OR_ONE),
        "prompt": Refusal("write the prompt into instructions and input"),
        "response_format": Refusal("use text.format"),
        "seed": Refusal("use POST /chat/completions"),
        "stop": Refusal("use POST /chat/completions"),
        "system": Refusal("use instructions"),
    }

    input: str | list[InputItem] | None = None
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[msgspec.Raw], Meta(extra={"items": AnyTool})] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: PositiveParam | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: _TextConfig | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    """`LOGPROBS_INCLUDE`; values for other models or hosted tools have no effect."""
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str | None] | None = None
    user: str | None = None
    client_metadata: IgnoredParam = None
    context_management: IgnoredParam = None
    prompt_cache_key: Any = None
    prompt_cache_retention: IgnoredParam = None
    safety_identifier: IgnoredParam = None
    max_tool_calls: IgnoredParam = None
    """Limit for tools that a provider's servers run."""
    moderation: IgnoredParam = None
    service_tier: IgnoredParam = None
    stream_options: IgnoredParam = None
    truncation: IgnoredParam = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS_INCLUDE in (self.include or ())


def build_model_call(
    request: ResponsesRequest, session: Session, model: ServedModel
) -> tuple[ModelCall, OfferedTools]:
    _refuse_conflicting_options(request)
    ignored = [*list_ignored_params(request)]
    dropped: list[str] = []
    offered = parse_tools(request.tools or [], ignored, dropped)
    tools = offered.schemas
    choice = _parse_tool_choice(request, tools, model)
    messages = [*_list_previous_messages(request, session)]
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        items = resolve_references(request.input or [], session.tree)
        messages += build_messages(items, ignored)
    if not messages:
        raise ProxyRequestError(400, "input is empty", key="input")
    effort = request.reasoning.effort if request.reasoning else None
    variables = build_reasoning_variables(model, "reasoning.effort", ignored, effort=effort)
    if any(name != LOGPROBS_INCLUDE for name in request.include or ()):
        ignored.append("include")
    form, schema = request.text.format if request.text else _TextFormat(), None
    if form.type != "text":
        raw_schema = form.schema if form.type == "json_schema" else {"type": "object"}
        schema = encode_text_schema(raw_schema, choice)
    defaults = session.request.sampling
    call = ModelCall(
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        template_variables=variables or None,
        sampling=SamplingParams(
            temperature=fill_default(request.temperature, defaults.temperature),
            max_new_tokens=request.max_output_tokens or 0,
            top_p=fill_default(request.top_p, defaults.top_p),
            top_k=defaults.top_k or -1,
            json_schema=schema,
        ),
        prompt_param_name="input",
        top_logprobs=request.top_logprobs or 0,
        ignored=ignored,
        dropped_tools=dropped,
        is_retrievable=request.store is not False,
    )
    return call, offered


def _parse_tool_choice(
    request: ResponsesRequest, tools: Sequence[dict[str, Any]], model: ServedModel
) -> ToolChoice:
    choice, parallel = request.tool_choice, request.parallel_tool_calls is not False
    mode, name, allowed = None, None, list[str]()
    if isinstance(choice, _AllowedToolChoice):
        allowed = [tool.name for tool in choice.tools if tool.name is not None]
        mode = choice.mode if allowed else "none"
    elif isinstance(choice, _NamedToolChoice):
        name = choice.name
    else:
        mode = choice
    return parse_tool_choice(model, tools, mode, name, parallel=parallel, allowed_names=allowed)


def _refuse_conflicting_options(request: ResponsesRequest) -> None:
    if request.top_logprobs and not request.wants_logprobs:
        raise ProxyRequestError(
            400, f"top_logprobs needs {LOGPROBS_INCLUDE} in include", key="top_logprobs"
        )
    form = request.text.format if request.text else None
    if form is not None and form.type == "json_schema" and form.schema is None:
        raise ProxyRequestError(400, "the schema is missing", key="text.format.schema")


def _list_previous_messages(request: ResponsesRequest, session: Session) -> Iterable[Message]:
    previous_id, tree = request.previous_response_id, session.tree
    if not previous_id:
        return []
    if previous_id not in tree:
        problem = f"this session has no response {previous_id!r}"
        raise ProxyRequestError(400, problem, key="previous_response_id")
    path = tree.get_path_to(tree[previous_id])
    if any(call.context == RAW_PROMPT_CONTEXT for call in path):
        problem = f"{previous_id!r} continues a plain prompt, not a conversation"
        raise ProxyRequestError(400, problem, key="previous_response_id")
    messages = [message for call in path for message in (*call.new_messages, call.reply)]
    return messages[1:] if previous_id.startswith(ID_PREFIX_WITH_INSTRUCTIONS) else messages


_EVENT_PREFIX_BY_KIND = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class _ResponsesExchange(Exchange):
    def __init__(self, request: ResponsesRequest, session: Session, model: ServedModel) -> None:
        call, self._tools = build_model_call(request, session, model)
        prefix = (
            ID_PREFIX_WITH_INSTRUCTIONS if request.instructions else ID_PREFIX_WITHOUT_INSTRUCTIONS
        )
        super().__init__(call, model, prefix, request.stream)
        self._request = request
        self._session = session
        self._splitter = BlockSplitter()
        self._sent = 0
        self._tokens: list[dict[str, Any]] = []
        self._sent_tokens = 0
        """Number of tokens whose text was sent."""
        self._end_status = "completed"
        """Status of the item that ends next."""

    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        (answer,) = answers
        return self._finish_response(answer, split_into_blocks(answer.content))

    async def stream_events(self, reply_stream: ReplyStream) -> AsyncGenerator[bytes, None]:
        async for event in reply_stream:
            beginning = self._format_beginning_once()
            if isinstance(event, ReplyChunk):
                self._tokens += self._format_logprobs(event.tokens)
                yield beginning + b"".join(
                    map(self._format_block_change, self._splitter.add_delta(event.content))
                )
            else:
                self._end_status = _get_status(event)
                rest = b"".join(map(self._format_block_change, self._splitter.finish()))
                response = msgspec.Raw(self._finish_response(event, self._splitter.blocks))
                end = self._format_event(f"response.{self._end_status}", response=response)
                yield beginning + rest + end

    def _format_beginning_once(self) -> bytes:
        if self._sent:
            return b""
        frame = self._build_response("in_progress")
        return self._format_event("response.created", response=frame) + self._format_event(
            "response.in_progress", response=frame
        )

    def format_ping(self) -> bytes:
        return self._format_beginning_once() or self._format_event("keepalive")

    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        fields = format_error_fields(refusal)
        code = fields["code"] or fields["type"]
        flat = {"code": code, "message": fields["message"], "param": fields["param"]}
        return self._format_event("error", error=fields, **flat)

    def _build_response(
        self, status: str, output: Sequence[dict[str, Any]] = (), usage: Any = None
    ) -> dict[str, Any]:
        request, sampling = self._request, self.call.sampling
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "model": self.model.name,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self.call.is_retrievable,
            "temperature": sampling.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": request.user,
            "metadata": {k: v for k, v in (request.metadata or {}).items() if v is not None},
        }

    def _finish_response(self, answer: RecordedChoice, blocks: Sequence[ContentBlock]) -> bytes:
        status, logprobs = _get_status(answer), self._format_logprobs(answer.generation)
        *ended, last = blocks
        output = [
            *(self._format_item(block, "completed", logprobs) for block in ended),
            self._format_item(last, status, logprobs),
        ]
        reasoning = answer.content.reasoning
        reasoning_tokens = len(self.model.encoder.encode(reasoning)) if reasoning else 0
        usage = format_usage(answer.interaction, reasoning_tokens)
        body = msgspec.json.encode(self._build_response(status, output, usage))
        if self.call.is_retrievable:
            self._session.keep_response(self.answer_id, body)
        return body

    def _format_logprobs(self, generated: Generation | TokenChunk) -> list[dict[str, Any]]:
        return (
            format_logprobs(generated, self.model.encoder) if self._request.wants_logprobs else []
        )

    def _format_item(
        self, block: ContentBlock, status: str, logprobs: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        return format_item(self.answer_id, block, status, logprobs, self._tools)

    def _format_event(self, kind: str, /, **fields: Any) -> bytes:
        event = format_named_event({"type": kind, **fields, "sequence_number": self._sent})
        self._sent += 1
        return event

    def _format_block_change(self, change: BlockChange) -> bytes:
        kind, block, text = change
        if kind == "begin":
            return self._format_block_start(block)
        if kind == "add":
            return self._format_block_delta(block, text)
        return self._format_block_end(block)

    def _build_location_fields(self, block: ContentBlock) -> dict[str, Any]:
        item_id = build_item_id(self.answer_id, block, self._tools)
        location = {"item_id": item_id, "output_index": block.index}
        return location if block.kind == "call" else {**location, "content_index": 0}

    def _format_block_start(self, block: ContentBlock) -> bytes:
        item = self._format_item(block, "in_progress", [])
        event = self._format_event(
            "response.output_item.added", output_index=block.index, item=item
        )
        if block.kind == "call":
            return event
        location, empty = self._build_location_fields(block), format_content_part(block, "", [])
        return event + self._format_event("response.content_part.added", **location, part=empty)

    def _format_block_delta(self, block: ContentBlock, text: str) -> bytes:
        if is_custom_call(block, self._tools):  # its text is known only when its JSON is complete
            return b""
        fields = {**self._build_location_fields(block), "delta": text}
        if block.kind == "text":
            fields["logprobs"] = self._tokens[self._sent_tokens :]
            self._sent_tokens = len(self._tokens)
        return self._format_event(f"{_EVENT_PREFIX_BY_KIND[block.kind]}.delta", **fields)

    def _format_block_end(self, block: ContentBlock) -> bytes:
        location = self._build_location_fields(block)
        name = f"{_EVENT_PREFIX_BY_KIND[block.kind]}.done"
        item = self._format_item(block, self._end_status, self._tokens)
        if is_custom_call(block, self._tools):
            name, text = "response.custom_tool_call_input", item["input"]
            events = self._format_event(f"{name}.delta", **location, delta=text)
            events += self._format_event(f"{name}.done", **location, input=text)
        elif block.kind == "call":
            events = self._format_event(name, **location, name=item["name"], arguments=block.text)
        else:
            logprobs = {"logprobs": self._tokens} if block.kind == "text" else {}
            events = self._format_event(name, **location, text=block.text, **logprobs)
            (part,) = item["content"]
            events += self._format_event("response.content_part.done", **location, part=part)
        return events + self._format_event(
            "response.output_item.done", output_index=block.index, item=item
        )


def _get_status(answer: RecordedChoice) -> str:
    return "incomplete" if answer.generation.finish_reason == "length" else "completed"


RESPONSES_DIALECT = Dialect(ResponsesRequest, _ResponsesExchange, format_error)
