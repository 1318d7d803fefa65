"""Requests of Google's generateContent: contents, tools and sampling become a model call.

A client sends a streamed reply back as the contents of its chunks, one after the other. They are
joined to one message of the assistant, which equals the recorded reply.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.google_schema import convert_to_json_schema
from areal_hpc.proxy.dialects.parameters import IgnoredParam, Refusal, list_ignored_params
from areal_hpc.proxy.dialects.validation import (
    MAX_TOP_K,
    MAX_TOP_LOGPROBS,
    Penalty,
    PositiveParam,
    Probability,
    Temperature,
    ToolName,
    WideSeed,
    build_function_tool,
    build_reasoning_variables,
    decode_request_json,
    encode_text_schema,
    fill_default,
    fold_seed_into_engine_range,
    join_user_texts,
    parse_tool_choice,
    write_choice_grammar,
)
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice, format_tool_call
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message, write_json_text
from areal_hpc.wire.proxy import SamplingDefaults


class _FunctionCall(Struct):
    name: str
    args: dict[str, Any] | None = None
    id: str | None = None


class _FunctionResponse(Struct):
    name: str
    response: dict[str, Any] = {}
    id: str | None = None
    parts: list[Any] | None = None


class Part(Struct, rename="camel", forbid_unknown_fields=True):
    drops_unknown: ClassVar[bool] = True
    """Whether to ignore unknown members, which SDKs send back with a part, without a count."""

    text: str | None = None
    thought: bool | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None
    thought_signature: Any = None
    inline_data: Any = None
    file_data: Any = None
    executable_code: Any = None
    code_execution_result: Any = None


_UNREADABLE_PARTS = {
    "inlineData": "inline_data",
    "fileData": "file_data",
    "executableCode": "executable_code",
    "codeExecutionResult": "code_execution_result",
}


class Content(Struct, rename="camel"):
    parts: list[Part] | Part = []
    role: str | None = None

    @property
    def listed_parts(self) -> list[Part]:
        return self.parts if isinstance(self.parts, list) else [self.parts]


_USER_ROLES = (None, "", "user", "function")


def build_messages(contents: Sequence[Content]) -> Iterator[Message]:
    for i, content in enumerate(contents):
        if content.role not in (*_USER_ROLES, "model"):
            problem = f"expected role 'user' or 'model', got {content.role!r}"
            raise ProxyRequestError(400, problem, key=f"contents[{i}].role")
    if contents[-1].role == "model":
        raise ProxyRequestError(
            400,
            "a reply cannot be begun for the model: the last content must be the user's",
            key=f"contents[{len(contents) - 1}]",
        )
    calls = _UnansweredCalls()
    for is_model, group in groupby(enumerate(contents), lambda pair: pair[1].role == "model"):
        turns = [(f"contents[{i}]", content.listed_parts) for i, content in group]
        if is_model:
            yield normalize_chat_message(_build_assistant_message(turns, calls))
        else:
            for key, parts in turns:
                yield from join_user_texts(_read_user_parts(key, parts, calls))


class _UnansweredCalls:
    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        self._count = 0

    def add(self, call: _FunctionCall) -> str:
        call_id = call.id or self._make_call_id()
        self._open.append((call_id, call.name))
        return call_id

    def pop_answered_call_id(self, response: _FunctionResponse) -> str:
        same_id = [call for call in self._open if call[0] == response.id]
        for call in same_id or [call for call in self._open if call[1] == response.name]:
            self._open.remove(call)
            return call[0]
        return response.id or self._make_call_id()  # its call is no longer in the history

    def _make_call_id(self) -> str:
        self._count += 1
        return f"call_{self._count}"


def _build_assistant_message(
    turns: Sequence[tuple[str, Sequence[Part]]], calls: _UnansweredCalls
) -> Message:
    text, reasoning, tool_calls = "", "", []
    for key, parts in turns:
        for j, part in enumerate(parts):
            _refuse_unreadable_part(part, f"{key}.parts[{j}]")
            if part.function_response is not None:
                problem = "a model's content cannot contain a functionResponse"
                raise ProxyRequestError(400, problem, key=f"{key}.parts[{j}]")
            if part.thought:
                reasoning += part.text or ""
            else:
                text += part.text or ""
            if part.function_call is not None:
                call = part.function_call
                call_id = calls.add(call)
                tool_calls.append(format_tool_call(call_id, call.name, call.args or {}))
    fields = {"reasoning_content": reasoning or None, "tool_calls": tool_calls}
    return {"role": "assistant", "content": text, **fields}


def _read_user_parts(
    key: str, parts: Sequence[Part], calls: _UnansweredCalls
) -> Iterator[str | Message]:
    for j, part in enumerate(parts):
        _refuse_unreadable_part(part, f"{key}.parts[{j}]")
        if part.function_call is not None:
            problem = "a user's content cannot contain a functionCall"
            raise ProxyRequestError(400, problem, key=f"{key}.parts[{j}]")
        if part.text is not None:
            yield part.text
        if (response := part.function_response) is not None:
            call_id = calls.pop_answered_call_id(response)
            result = _read_response_text(response.response)
            yield {"role": "tool", "tool_call_id": call_id, "content": result}
    if not parts:
        yield ""


def _refuse_unreadable_part(part: Part, key: str) -> None:
    for name, attribute in _UNREADABLE_PARTS.items():
        if getattr(part, attribute) is not None:
            problem = f"parts with {name} are not supported: the model reads text alone"
            raise ProxyRequestError(400, problem, key=f"{key}.{name}")
    if part.function_response is not None and part.function_response.parts:
        problem = "the model reads text alone"
        raise ProxyRequestError(400, problem, key=f"{key}.functionResponse.parts")
    readable = (part.text, part.function_call, part.function_response, part.thought_signature)
    if all(value is None for value in readable):
        problem = "expected a part with text, functionCall or functionResponse"
        raise ProxyRequestError(400, problem, key=key)


def _read_response_text(response: dict[str, Any]) -> str:
    if [*response] == ["output"]:
        return write_json_text(response["output"])
    if [*response] == ["error"]:  # templates have no mark for a failure, so the text has it
        text = write_json_text(response["error"])
        return text if "error" in text.lower() else f"Error: {text}"
    return write_json_text(response)


_CHOICE_KEY = "toolConfig.functionCallingConfig"


class _FunctionDeclaration(Struct, rename="camel", forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    behavior: IgnoredParam = None
    response: IgnoredParam = None
    """Schema of the result, which prompts do not contain."""
    response_json_schema: IgnoredParam = None


class _Tool(Struct, rename="camel", forbid_unknown_fields=True):
    """Functions, or a tool of another kind, which only Google's servers or models have.

    Such tools are left out if there are functions: agents offer them unasked.
    """

    function_declarations: list[msgspec.Raw] | None = None
    code_execution: Any = None
    enterprise_web_search: Any = None
    google_maps: Any = None
    google_search: Any = None
    google_search_retrieval: Any = None
    url_context: Any = None
    computer_use: Any = None
    file_search: Any = None
    mcp_servers: Any = None
    retrieval: Any = None


class FunctionCallingConfig(Struct, rename="camel", forbid_unknown_fields=True):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] = "AUTO"
    allowed_function_names: list[str] | None = None
    stream_function_call_arguments: IgnoredParam = None


class ToolConfig(Struct, rename="camel", forbid_unknown_fields=True):
    function_calling_config: FunctionCallingConfig | None = None
    include_server_side_tool_invocations: IgnoredParam = None
    retrieval_config: IgnoredParam = None


def _parse_tools(
    raw_tools: Sequence[msgspec.Raw], ignored: list[str], dropped: list[str]
) -> list[dict[str, Any]]:
    functions: list[dict[str, Any]] = []
    hosted: dict[str, str] = {}
    hints: set[str] = set()
    for i, raw in enumerate(raw_tools):
        key = f"tools[{i}]"
        tool: _Tool = decode_request_json(raw, _Tool, key, ignored)
        _, *others = zip(tool.__struct_fields__, tool.__struct_encode_fields__, strict=True)
        names = [wire_name for name, wire_name in others if getattr(tool, name) is not None]
        hosted |= {name: f"{key}.{name}" for name in names}
        for j, declared in enumerate(tool.function_declarations or ()):
            path = f"{key}.functionDeclarations[{j}]"
            function: _FunctionDeclaration = decode_request_json(
                declared, _FunctionDeclaration, path, ignored
            )
            hints.update(list_ignored_params(function, "tools[].functionDeclarations[]."))
            schemas = function.parameters, function.parameters_json_schema
            schema = _convert_schema(*schemas, f"{path}.parameters", "parametersJsonSchema")
            functions.append(build_function_tool(function.name, function.description, schema, None))
    if hosted and not functions:
        name, path = next(iter(hosted.items()))
        hint = "declare a function that the agent runs"
        raise ProxyRequestError(400, f"{name} is run by Google's servers", key=path, hint=hint)
    ignored += sorted(hints)
    dropped += sorted(hosted)
    return functions


def _convert_schema(schema: Any, json_schema: Any, key: str, other_name: str) -> Any:
    parent, _, name = key.rpartition(".")
    if json_schema is None:
        return convert_to_json_schema(schema, key)
    if schema is not None:
        raise ProxyRequestError(400, f"{name} and {other_name} cannot be combined", key=key)
    return convert_to_json_schema(json_schema, f"{parent}.{other_name}")


def _read_tool_choice(
    tool_config: ToolConfig | None, tools: Sequence[dict[str, Any]], model: ServedModel
) -> ToolChoice:
    config = (
        tool_config.function_calling_config if tool_config else None
    ) or FunctionCallingConfig()
    names = config.allowed_function_names or []
    if names and config.mode not in ("ANY", "VALIDATED"):
        problem = f"allowedFunctionNames needs mode ANY or VALIDATED, got {config.mode}"
        raise ProxyRequestError(400, problem, key=_CHOICE_KEY)
    if config.mode == "ANY" and not tools:
        raise ProxyRequestError(400, "mode ANY needs functions", key=_CHOICE_KEY)
    offered = {tool["function"]["name"] for tool in tools}
    if missing := [name for name in names if name not in offered]:
        problem = f"there is no function {missing[0]!r}"
        raise ProxyRequestError(400, problem, key=f"{_CHOICE_KEY}.allowedFunctionNames")
    mode = {"ANY": "required", "NONE": "none"}.get(config.mode, "auto")
    choice = parse_tool_choice(model, tools, mode, None, parallel=True, allowed_names=names)
    follows_schemas = config.mode in ("ANY", "VALIDATED")
    return msgspec.structs.replace(choice, follows_schemas=follows_schemas)


_CONFIG_KEY = "generationConfig"
_OBJECT_OR_ARRAY_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "array"}]}


class _ThinkingConfig(Struct, rename="camel", forbid_unknown_fields=True):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: Any = None


class GenerationConfig(Struct, rename="camel", forbid_unknown_fields=True):
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[float, Meta(ge=-1, le=MAX_TOP_K)] | None = None
    """Whole number, which the Python SDK sends as a float."""
    candidate_count: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_output_tokens: PositiveParam | None = None
    stop_sequences: list[str] | None = None
    seed: WideSeed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[str] | None = None
    thinking_config: _ThinkingConfig | None = None
    audio_timestamp: IgnoredParam = None
    enable_affective_dialog: IgnoredParam = None
    enable_enhanced_civic_answers: IgnoredParam = None
    image_config: IgnoredParam = None
    media_resolution: IgnoredParam = None
    model_selection_config: IgnoredParam = None
    routing_config: IgnoredParam = None
    speech_config: IgnoredParam = None


class GenerateContentRequest(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "cachedContent": Refusal("send the contents; tokens of a conversation are re-used"),
        "input": Refusal("use contents"),
        "messages": Refusal("use contents, or POST /chat/completions"),
        "prompt": Refusal("use contents"),
        "system": Refusal("use systemInstruction"),
    }

    contents: list[Content] | Content
    model: str = ""
    system_instruction: Content | None = None
    tools: list[msgspec.Raw] | msgspec.Raw | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    labels: IgnoredParam = None
    safety_settings: IgnoredParam = None
    service_tier: IgnoredParam = None
    store: IgnoredParam = None

    @property
    def config(self) -> GenerationConfig:
        return self.generation_config or GenerationConfig()


class CountTokensRequest(GenerateContentRequest, kw_only=True):
    """Body of POST models/{model}:countTokens: contents, or a whole request."""

    contents: list[Content] | Content | None = None  # type: ignore[assignment]
    generate_content_request: GenerateContentRequest | None = None

    def get_whole_request(self) -> GenerateContentRequest:
        if (self.generate_content_request is None) == (self.contents is None):
            problem = "give either contents or a generateContentRequest"
            raise ProxyRequestError(400, problem, key="contents")
        return self.generate_content_request or self


def build_model_call(
    request: GenerateContentRequest, defaults: SamplingDefaults, model: ServedModel
) -> ModelCall:
    config, ignored = request.config, [*list_ignored_params(request)]
    dropped: list[str] = []
    _refuse_unsupported_options(config)
    contents = request.contents if isinstance(request.contents, list) else [request.contents]
    if not contents:
        raise ProxyRequestError(400, "contents is empty", key="contents")
    raw_tools = request.tools if isinstance(request.tools, list) else [request.tools]
    tools = _parse_tools([raw for raw in raw_tools if raw is not None], ignored, dropped)
    choice = _read_tool_choice(request.tool_config, tools, model)
    top_k = fill_default(config.top_k, defaults.top_k) or -1
    return ModelCall(
        messages=[*_build_system_message(request.system_instruction), *build_messages(contents)],
        tools=tools or None,
        tool_choice=choice,
        template_variables=_build_thinking_variables(config.thinking_config, model, ignored),
        sampling=SamplingParams(
            temperature=fill_default(config.temperature, defaults.temperature),
            max_new_tokens=config.max_output_tokens or 0,
            top_p=fill_default(config.top_p, defaults.top_p),
            top_k=int(top_k),
            frequency_penalty=config.frequency_penalty or 0.0,
            presence_penalty=config.presence_penalty or 0.0,
            stop=[text for text in config.stop_sequences or () if text] or None,
            sampling_seed=fold_seed_into_engine_range(config.seed),
            **_build_grammar(config, choice),
        ),
        prompt_param_name="contents",
        n=config.candidate_count or 1,
        top_logprobs=config.logprobs or 0,
        ignored=ignored,
        dropped_tools=dropped,
    )


def _refuse_unsupported_options(config: GenerationConfig) -> None:
    if config.top_k is not None and config.top_k != int(config.top_k):
        problem = f"expected a whole number, got {config.top_k}"
        raise ProxyRequestError(400, problem, key=f"{_CONFIG_KEY}.topK")
    if config.logprobs and not config.response_logprobs:
        problem = "logprobs needs responseLogprobs"
        raise ProxyRequestError(400, problem, key=f"{_CONFIG_KEY}.logprobs")
    for kind in config.response_modalities or ():
        if kind.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            problem = f"expected TEXT, got {kind!r}: the model writes text alone"
            raise ProxyRequestError(400, problem, key=f"{_CONFIG_KEY}.responseModalities")


def _build_system_message(instruction: Content | None) -> Iterator[Message]:
    texts = []
    for j, part in enumerate(instruction.listed_parts if instruction is not None else ()):
        key = f"systemInstruction.parts[{j}]"
        _refuse_unreadable_part(part, key)
        if part.function_call is not None or part.function_response is not None:
            raise ProxyRequestError(400, "only text is supported here", key=key)
        texts += [part.text] if part.text else []
    if texts:
        yield normalize_chat_message({"role": "system", "content": "\n".join(texts)})


def _build_thinking_variables(
    thinking_config: _ThinkingConfig | None, model: ServedModel, ignored: list[str]
) -> dict[str, Any] | None:
    if thinking_config is None:
        return None
    key, variables = f"{_CONFIG_KEY}.thinkingConfig", {}
    if isinstance(thinking_config.thinking_level, str):
        level = thinking_config.thinking_level.lower()
        variables = build_reasoning_variables(model, f"{key}.thinkingLevel", ignored, effort=level)
    budget = thinking_config.thinking_budget
    if budget is not None and budget >= 0:
        without_effect: list[str] = []
        name, thinks = f"{key}.thinkingBudget", budget > 0
        variables |= build_reasoning_variables(model, name, without_effect, thinks=thinks)
        ignored += [name] if thinks else without_effect  # a budget above 0 is only a target
    return variables or None


def _build_grammar(config: GenerationConfig, tool_choice: ToolChoice) -> dict[str, Any]:
    schemas = config.response_schema, config.response_json_schema
    schema = _convert_schema(*schemas, f"{_CONFIG_KEY}.responseSchema", "responseJsonSchema")
    has_schema = schemas != (None, None)
    kind = config.response_mime_type or ("application/json" if has_schema else "text/plain")
    if kind == "text/x.enum" and isinstance(values := (schema or {}).get("enum"), list) and values:
        grammar = write_choice_grammar(map(str, values))
        return {} if tool_choice.must_call else {"ebnf": grammar}
    if kind == "application/json":
        return {"json_schema": encode_text_schema(schema or _OBJECT_OR_ARRAY_SCHEMA, tool_choice)}
    if kind != "text/plain" or has_schema:
        problem = f"{kind!r} cannot hold here; a schema needs 'application/json', or 'text/x.enum'"
        raise ProxyRequestError(
            400, f"{problem} and an enum", key=f"{_CONFIG_KEY}.responseMimeType"
        )
    return {}
