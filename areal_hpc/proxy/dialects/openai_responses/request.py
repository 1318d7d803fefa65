"""OpenAI Responses requests.

`store` says whether the reply can be retrieved; a session records everything. Reasoning is given in
the open, and taken back from there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.openai_responses.input_items import (
    InputItem,
    build_messages,
    resolve_references,
)
from areal_hpc.proxy.dialects.openai_responses.output_items import ID_PREFIX_WITH_INSTRUCTIONS
from areal_hpc.proxy.dialects.openai_responses.tools import AnyTool, OfferedTools, parse_tools
from areal_hpc.proxy.dialects.parameters import (
    EMPTY_VALUES,
    EMPTY_VALUES_OR_ONE,
    IgnoredParam,
    Refusal,
    list_ignored_params,
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
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import Message
from areal_hpc.session.completion_prompts import RAW_PROMPT_CONTEXT

LOGPROBS_INCLUDE = "message.output_text.logprobs"


class _NamedToolChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str


class _CustomToolChoice(_NamedToolChoice, tag="custom"):
    pass


class _AllowedTool(Struct):
    name: str | None = None
    """Tools of a provider's servers have none."""
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
    """`LOGPROBS_INCLUDE`, and what other models and hosted tools would add, which are not here."""
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str | None] | None = None
    user: str | None = None
    client_metadata: IgnoredParam = None
    context_management: IgnoredParam = None
    prompt_cache_key: IgnoredParam = None
    prompt_cache_retention: IgnoredParam = None
    safety_identifier: IgnoredParam = None
    max_tool_calls: IgnoredParam = None
    """Of tools that a provider's servers run."""
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
    """Build the model call, and the tools that the request offers."""
    _refuse_conflicting_options(request)
    ignored = [*list_ignored_params(request)]
    dropped: list[str] = []
    offered = parse_tools(request.tools or [], model, ignored, dropped)
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
        asked = form.schema if form.type == "json_schema" else {"type": "object"}
        schema = encode_text_schema(asked, choice)
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
    asked, parallel = request.tool_choice, request.parallel_tool_calls is not False
    mode, name, allowed = None, None, list[str]()
    if isinstance(asked, _AllowedToolChoice):
        allowed = [one.name for one in asked.tools if one.name is not None]
        mode = asked.mode if allowed else "none"
    elif isinstance(asked, _NamedToolChoice):
        name = asked.name
    else:
        mode = asked
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
    if any(one.context == RAW_PROMPT_CONTEXT for one in path):
        problem = f"{previous_id!r} continues a plain prompt, not a conversation"
        raise ProxyRequestError(400, problem, key="previous_response_id")
    messages = [message for one in path for message in (*one.new_messages, one.reply)]
    return messages[1:] if previous_id.startswith(ID_PREFIX_WITH_INSTRUCTIONS) else messages
