"""OpenAI Responses requests.

Every parameter is honoured, accepted without effect because it is a hint (`hints`), or refused by
name. `model` is any name: a cell serves one model. `store` says whether the reply can be retrieved;
a session records everything. Reasoning is given in the open, and taken back from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import RequestError
from areal_hpc.proxy.dialects.hints import Hint, hints_in
from areal_hpc.proxy.dialects.openai_responses.input_items import InputItem, build_messages
from areal_hpc.proxy.dialects.openai_responses.tools import ToolSet, parse_tools
from areal_hpc.proxy.dialects.validation import (
    PositiveParam,
    Probability,
    Temperature,
    check_tools_supported,
    decode,
    effort_variables,
    encode_json_schema,
    first_given,
    parse_tool_choice,
)
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import Message
from areal_hpc.session.completion_prompts import RAW_CONTEXT
from areal_hpc.wire.proxy import SamplingDefaults

LOGPROBS = "message.output_text.logprobs"
WITH_INSTRUCTIONS_PREFIX = "resp_i"
"""How the ids of replies begin whose prompt began with `instructions`: a next request that names
such a reply brings its own. Other ids begin with `PLAIN`."""
PLAIN_PREFIX = "resp_n"


class _ResponsesToolChoice(Struct, forbid_unknown_fields=True):
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
    """The body of POST /v1/responses, as far as this proxy can honour it."""

    input: str | list[InputItem] | None = None
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: PositiveParam | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: _TextConfig | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    """`LOGPROBS`, and what other models and hosted tools would add, which are not here."""
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
    def with_logprobs(self) -> bool:
        """The reply's tokens and their log-probabilities are asked for."""
        return LOGPROBS in (self.include or ())


_decoder = msgspec.json.Decoder(ResponsesRequest)


def parse(
    body: bytes, session: Session, model: ServedModel
) -> tuple[ResponsesRequest, ToolSet, ModelCall]:
    """Validate a request.

    Args:
        body: As received.
        session: Its defaults apply where the request is silent; it knows the previous response.
        model: Who will answer.

    Raises:
        RequestError: 400, naming the parameter that is wrong or cannot be honoured.
    """
    request = decode(_decoder, body)
    _refuse_contradictions(request)
    tools = parse_tools(request.tools or [])
    choice = _tool_choice(request, tools)
    check_tools_supported(model, tools.schemas, choice)
    messages = [*_instructions(request), *_previous(request, session), *_input(request)]
    if not messages:
        raise RequestError(400, "input is empty", key="input")
    variables = effort_variables(request.reasoning.effort, model) if request.reasoning else None
    return (
        request,
        tools,
        ModelCall(
            messages=messages,
            tools=tools.schemas if choice.mode != "none" else None,
            tool_choice=choice,
            variables=variables,
            sampling=_sampling_of(request, session.request.sampling, choice),
            prompt_key="input",
            top_logprobs=request.top_logprobs or 0,
            ignored=[*hints_in(request), *sorted(tools.ignored), *_unheard(request, variables)],
        ),
    )


def _refuse_contradictions(request: ResponsesRequest) -> None:
    if request.background:
        raise RequestError(400, "background=true is not supported", key="background")
    if request.top_logprobs and not request.with_logprobs:
        raise RequestError(400, f"top_logprobs needs {LOGPROBS} in include", key="top_logprobs")
    options = request.stream_options
    if options is not None and (options.include_obfuscation or not request.stream):
        problem = "stream_options supports only include_obfuscation=false"
        raise RequestError(400, problem, key="stream_options")
    form = request.text.format if request.text else None
    if form is not None and form.type == "json_schema" and form.schema is None:
        raise RequestError(400, "the schema is missing", key="text.format.schema")


def _instructions(request: ResponsesRequest) -> Iterable[Message]:
    if request.instructions:
        yield {"role": "system", "content": request.instructions}


def _previous(request: ResponsesRequest, session: Session) -> Iterable[Message]:
    """The conversation up to the previous response, without its instructions."""
    previous_id, tree = request.previous_response_id, session.tree
    if previous_id is None:
        return []
    if previous_id not in tree:
        problem = f"this session has no response {previous_id!r}"
        raise RequestError(400, problem, key="previous_response_id")
    path = tree.path(tree[previous_id])
    if any(one.context == RAW_CONTEXT for one in path):
        problem = f"{previous_id!r} continues a plain prompt, not a conversation"
        raise RequestError(400, problem, key="previous_response_id")
    messages = [message for one in path for message in (*one.new_messages, one.reply)]
    return messages[1:] if previous_id.startswith(WITH_INSTRUCTIONS_PREFIX) else messages


def _input(request: ResponsesRequest) -> Iterable[Message]:
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    return build_messages(request.input or [])


def _tool_choice(request: ResponsesRequest, tools: ToolSet) -> ToolChoice:
    asked = request.tool_choice
    mode, name = (None, asked.name) if isinstance(asked, _ResponsesToolChoice) else (asked, None)
    parallel = request.parallel_tool_calls is not False
    return parse_tool_choice(tools.schemas, mode, name, parallel=parallel)


def _unheard(request: ResponsesRequest, variables: dict[str, Any] | None) -> Iterator[str]:
    """Names of the parameters that are hints by their values."""
    if request.reasoning and request.reasoning.effort is not None and variables is None:
        yield "reasoning.effort"
    if any(name != LOGPROBS for name in request.include or ()):
        yield "include"


def _sampling_of(
    request: ResponsesRequest, defaults: SamplingDefaults, choice: ToolChoice
) -> SamplingParams:
    form = request.text.format if request.text else _TextFormat()
    schema = None
    if form.type != "text":
        asked = form.schema if form.type == "json_schema" else {"type": "object"}
        schema = encode_json_schema(asked, choice)
    return SamplingParams(
        temperature=first_given(request.temperature, defaults.temperature),
        max_new_tokens=request.max_output_tokens or 0,
        top_p=first_given(request.top_p, defaults.top_p),
        top_k=defaults.top_k or -1,
        json_schema=schema,
    )
