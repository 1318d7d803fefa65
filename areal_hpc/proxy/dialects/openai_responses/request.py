"""OpenAI Responses requests.

`store` says whether the reply can be retrieved; a session records everything. Reasoning is given in
the open, and taken back from there.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.hints import Hint, list_ignored_params
from areal_hpc.proxy.dialects.openai_responses.input_items import (
    InputItem,
    build_messages,
    qualify_tool_name,
)
from areal_hpc.proxy.dialects.validation import (
    MAX_TOP_LOGPROBS,
    PositiveParam,
    Probability,
    Temperature,
    ToolName,
    build_effort_variables,
    build_function_tool,
    decode_json,
    encode_json_schema,
    first_given,
    leave_out_hosted_tools,
    parse_tool_choice,
)
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import Message
from areal_hpc.session.completion_prompts import RAW_PROMPT_CONTEXT

LOGPROBS_INCLUDE = "message.output_text.logprobs"
ID_PREFIX_WITH_INSTRUCTIONS = "resp_i"
"""How the ids of replies begin whose prompt began with `instructions`: a next request that names
such a reply brings its own. Other ids begin with `ID_PREFIX_WITHOUT_INSTRUCTIONS`."""
ID_PREFIX_WITHOUT_INSTRUCTIONS = "resp_n"
ToolOrigins = dict[str, tuple[str, str]]
"""Namespace and name of the tools that have a namespace, by the name the model knows."""
_HOSTED_TOOL_PATTERN = re.compile(
    r"(web_search|web_search_preview|image_generation|tool_search)(_[0-9_]+)?"
)
"""Types of such tools, dated or not. Those that name a client's own files, servers or containers
are not among them: who asks for one needs it."""


class _ToolFunction(Struct, tag="function", forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Hint = None


class _ToolNamespace(Struct, tag="namespace", forbid_unknown_fields=True):
    name: str
    tools: list[_ToolFunction]
    description: str | None = None


class _NamedToolChoice(Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["function"]


class _TextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _TextConfig(Struct, forbid_unknown_fields=True):
    format: _TextFormat = msgspec.field(default_factory=_TextFormat)
    verbosity: Hint = None


class _Reasoning(Struct, forbid_unknown_fields=True):
    effort: Any = None
    summary: Hint = None
    generate_summary: Hint = None


class _ResponsesStreamOptions(Struct):
    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses, as far as this proxy can honor it."""

    input: str | list[InputItem] | None = None
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedToolChoice | None = None
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
    stream_options: _ResponsesStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    client_metadata: Hint = None
    context_management: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    service_tier: Hint = None
    truncation: Hint = None

    @property
    def wants_logprobs(self) -> bool:
        """The reply's tokens and their log-probabilities are asked for."""
        return LOGPROBS_INCLUDE in (self.include or ())


def build_model_call(
    request: ResponsesRequest, session: Session, model: ServedModel
) -> tuple[ModelCall, ToolOrigins]:
    """What a request asks of the model, and where the tools come from that have a namespace.

    Raises:
        ProxyRequestError: 400, naming the parameter that is wrong or cannot be honored.
    """
    _validate_options(request)
    ignored = [*list_ignored_params(request)]
    tools, origins = _parse_tools(request.tools or [], model, ignored)
    asked_choice = request.tool_choice
    mode = asked_choice if isinstance(asked_choice, str) else None
    name = asked_choice.name if isinstance(asked_choice, _NamedToolChoice) else None
    parallel = request.parallel_tool_calls is not False
    choice = parse_tool_choice(model, tools, mode, name, parallel=parallel)
    messages = [*_list_previous_messages(request, session)]
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += build_messages(request.input or [])
    if not messages:
        raise ProxyRequestError(400, "input is empty", key="input")
    effort = request.reasoning.effort if request.reasoning else None
    variables = build_effort_variables(effort, model, "reasoning.effort", ignored)
    if any(name != LOGPROBS_INCLUDE for name in request.include or ()):
        ignored.append("include")
    form, schema = request.text.format if request.text else _TextFormat(), None
    if form.type != "text":
        asked = form.schema if form.type == "json_schema" else {"type": "object"}
        schema = encode_json_schema(asked, choice)
    defaults = session.request.sampling
    call = ModelCall(
        messages=messages,
        tools=tools if choice.mode != "none" else None,
        tool_choice=choice,
        variables=variables or None,
        sampling=SamplingParams(
            temperature=first_given(request.temperature, defaults.temperature),
            max_new_tokens=request.max_output_tokens or 0,
            top_p=first_given(request.top_p, defaults.top_p),
            top_k=defaults.top_k or -1,
            json_schema=schema,
        ),
        prompt_key="input",
        top_logprobs=request.top_logprobs or 0,
        ignored=ignored,
    )
    return call, origins


def _validate_options(request: ResponsesRequest) -> None:
    if request.background:
        raise ProxyRequestError(400, "background=true is not supported", key="background")
    if request.top_logprobs and not request.wants_logprobs:
        raise ProxyRequestError(
            400, f"top_logprobs needs {LOGPROBS_INCLUDE} in include", key="top_logprobs"
        )
    options = request.stream_options
    if options is not None and (options.include_obfuscation or not request.stream):
        problem = "stream_options supports only include_obfuscation=false"
        raise ProxyRequestError(400, problem, key="stream_options")
    form = request.text.format if request.text else None
    if form is not None and form.type == "json_schema" and form.schema is None:
        raise ProxyRequestError(400, "the schema is missing", key="text.format.schema")


def _list_previous_messages(request: ResponsesRequest, session: Session) -> Iterable[Message]:
    """The conversation up to the previous response, without its instructions."""
    previous_id, tree = request.previous_response_id, session.tree
    if previous_id is None:
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


def _parse_tools(
    raw: Sequence[msgspec.Raw], model: ServedModel, ignored: list[str]
) -> tuple[list[dict[str, Any]], ToolOrigins]:
    """The tools as chat templates expect them. Hints in them are added to `ignored`.

    A tool within a namespace is known to the model as `namespace.name`, and the description of
    the namespace stands before its own. Tools that OpenAI's servers would run, and that coding
    agents offer by themselves, are left out when there are functions beside them: the model is not
    told of them, so it calls none.
    """
    schemas: list[dict[str, Any]] = []
    origins: ToolOrigins = {}
    hints: set[str] = set()
    unknown = ignored if model.ignores_unknown else None
    for i, one in leave_out_hosted_tools(raw, _HOSTED_TOOL_PATTERN, ignored):
        tool: _ToolFunction | _ToolNamespace = decode_json(
            one, _ToolFunction | _ToolNamespace, f"tools[{i}]", unknown
        )
        for function in [tool] if isinstance(tool, _ToolFunction) else tool.tools:
            hints.update(list_ignored_params(function, "tools[]."))
            name, description = function.name, function.description
            if isinstance(tool, _ToolNamespace):
                name = qualify_tool_name(tool.name, name)
                origins[name] = (tool.name, function.name)
                description = "\n".join(filter(None, (tool.description, description))) or None
            schemas.append(
                build_function_tool(name, description, function.parameters, function.strict)
            )
    ignored += sorted(hints)
    return schemas, origins
