"""Google's generateContent requests."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.google.contents import Content, build_messages, read_text_only_content
from areal_hpc.proxy.dialects.google.schema import convert_to_json_schema
from areal_hpc.proxy.dialects.google.tools import ToolConfig, parse_tools, read_tool_choice
from areal_hpc.proxy.dialects.parameters_without_effect import IgnoredParam, list_ignored_params
from areal_hpc.proxy.dialects.reasoning import build_reasoning_variables
from areal_hpc.proxy.dialects.refused_parameters import RefusedParamRule
from areal_hpc.proxy.dialects.validation import (
    MAX_TOP_K,
    MAX_TOP_LOGPROBS,
    Penalty,
    PositiveParam,
    Probability,
    Temperature,
    WideSeed,
    encode_schema_unless_must_call,
    fold_seed_into_engine_range,
    get_given_or_default,
)
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.wire.proxy import SamplingDefaults

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
    """A whole number, which the Python SDK sends as a float."""
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
    refused: ClassVar[Mapping[str, RefusedParamRule]] = {
        "cachedContent": RefusedParamRule(
            "send the contents; tokens of a conversation are re-used"
        ),
        "input": RefusedParamRule("use contents"),
        "messages": RefusedParamRule("use contents, or POST /chat/completions"),
        "prompt": RefusedParamRule("use contents"),
        "system": RefusedParamRule("use systemInstruction"),
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


class CountTokensRequest(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """The body of POST models/{model}:countTokens: contents, or all of a request."""

    contents: list[Content] | Content | None = None
    generate_content_request: GenerateContentRequest | None = None
    model: str = ""
    system_instruction: Content | None = None
    tools: list[msgspec.Raw] | msgspec.Raw | None = None
    generation_config: GenerationConfig | None = None
    labels: IgnoredParam = None

    def build_whole_request(self) -> GenerateContentRequest:
        """The request whose tokens are counted."""
        whole, contents = self.generate_content_request, self.contents
        if (whole is None) == (contents is None):
            problem = "give either contents or a generateContentRequest"
            raise ProxyRequestError(400, problem, key="contents")
        if whole is not None:
            return whole
        assert contents is not None
        return GenerateContentRequest(
            contents=contents,
            system_instruction=self.system_instruction,
            tools=self.tools,
            generation_config=self.generation_config,
        )


def build_model_call(
    request: GenerateContentRequest, defaults: SamplingDefaults, model: ServedModel
) -> ModelCall:
    """What a request asks of the model; the defaults apply where it is silent."""
    config, ignored = request.config, [*list_ignored_params(request)]
    dropped: list[str] = []
    _refuse_unsupported_options(config)
    contents = request.contents if isinstance(request.contents, list) else [request.contents]
    if not contents:
        raise ProxyRequestError(400, "contents is empty", key="contents")
    raw = request.tools if isinstance(request.tools, list) else [request.tools]
    tools = parse_tools([one for one in raw if one is not None], model, ignored, dropped)
    choice = read_tool_choice(request.tool_config, tools, model)
    top_k = get_given_or_default(config.top_k, defaults.top_k) or -1
    return ModelCall(
        messages=[*_build_system_message(request.system_instruction), *build_messages(contents)],
        tools=tools or None,
        tool_choice=choice,
        template_variables=_build_thinking_variables(config.thinking_config, model, ignored),
        sampling=SamplingParams(
            temperature=get_given_or_default(config.temperature, defaults.temperature),
            max_new_tokens=config.max_output_tokens or 0,
            top_p=get_given_or_default(config.top_p, defaults.top_p),
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
    text = (
        read_text_only_content(instruction, "systemInstruction") if instruction is not None else ""
    )
    if text:
        yield normalize_chat_message({"role": "system", "content": text})


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
        unheard: list[str] = []
        name, thinks = f"{key}.thinkingBudget", budget > 0
        variables |= build_reasoning_variables(model, name, unheard, thinks=thinks)
        ignored += [name] if thinks else unheard  # as Anthropic's, more than none is a target
    return variables or None


def _build_grammar(config: GenerationConfig, tool_choice: ToolChoice) -> dict[str, Any]:
    schema, key = config.response_schema, f"{_CONFIG_KEY}.responseSchema"
    if config.response_json_schema is not None:
        if schema is not None:
            problem = "responseSchema and responseJsonSchema cannot be combined"
            raise ProxyRequestError(400, problem, key=key)
        schema, key = config.response_json_schema, f"{_CONFIG_KEY}.responseJsonSchema"
    built = convert_to_json_schema(schema, key)
    kind = config.response_mime_type or ("text/plain" if schema is None else "application/json")
    if kind == "text/x.enum" and isinstance(values := (built or {}).get("enum"), list) and values:
        terms = " | ".join(msgspec.json.encode(str(value)).decode() for value in values)
        return {} if tool_choice.must_call else {"ebnf": f"root ::= {terms}"}
    if kind == "application/json":
        return {
            "json_schema": encode_schema_unless_must_call(
                built or _OBJECT_OR_ARRAY_SCHEMA, tool_choice
            )
        }
    if kind != "text/plain" or schema is not None:
        problem = f"{kind!r} cannot hold here; a schema needs 'application/json', or 'text/x.enum'"
        raise ProxyRequestError(
            400, f"{problem} and an enum", key=f"{_CONFIG_KEY}.responseMimeType"
        )
    return {}
