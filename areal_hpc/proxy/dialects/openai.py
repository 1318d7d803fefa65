"""Common part of OpenAI's Chat Completions and Completions: sampling, choices, usage, errors.

The sampling parameters are OpenAI's with SGLang's and vLLM's extensions.
"""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.reply import RecordedChoice, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.dialect import Exchange
from areal_hpc.proxy.dialects.parameters import Refusal, list_ignored_params
from areal_hpc.proxy.dialects.validation import (
    Bias,
    Penalty,
    PositiveParam,
    Probability,
    Temperature,
    TopK,
    WideSeed,
    check_token_ids,
    encode_text_schema,
    fill_default,
    fold_seed_into_engine_range,
    write_choice_grammar,
)
from areal_hpc.proxy.engine.generation import Generation, SamplingParams, TokenChunk, TopLogprobs
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.message_matching import write_json_text
from areal_hpc.session.tree import format_ids_as_json_inside, unpack_ids
from areal_hpc.wire.proxy import SamplingDefaults


class StreamOptions(Struct):
    include_usage: bool | None = None


class _JsonSchema(Struct):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StructuredOutputs(Struct, forbid_unknown_fields=True):
    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SharedCompletionParams(Struct, forbid_unknown_fields=True, kw_only=True):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "background": Refusal("wait for the reply, or stream it"),
        "input": Refusal("use messages, or POST /responses"),
        "system": Refusal("write a message whose role is system"),
    }

    model: str = ""
    max_tokens: PositiveParam | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    seed: WideSeed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Bias] | None = None
    response_format: _ResponseFormat | None = None
    user: Any = None
    # Beyond OpenAI, under SGLang's names:
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    stop_token_ids: list[int] | None = None
    regex: str | None = None
    ebnf: str | None = None
    # And under vLLM's:
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    return_token_ids: bool | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: _StructuredOutputs | None = None

    @property
    def wants_stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def check_shared_params(request: SharedCompletionParams, model: ServedModel) -> None:
    form = request.response_format
    if form is not None and form.type == "json_schema" and form.json_schema is None:
        raise ProxyRequestError(400, "the schema is missing", key="response_format.json_schema")
    check_token_ids(model, "stop_token_ids", request.stop_token_ids)
    check_token_ids(model, "logit_bias", request.logit_bias)


def list_all_ignored_params(request: SharedCompletionParams) -> list[str]:
    more = ["stream_options"] if request.stream_options and not request.stream else []
    return [*list_ignored_params(request), *more]


def build_sampling_params(
    request: SharedCompletionParams,
    defaults: SamplingDefaults,
    tool_choice: ToolChoice,
    max_new_tokens: int,
) -> SamplingParams:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    return SamplingParams(
        temperature=fill_default(request.temperature, defaults.temperature),
        max_new_tokens=max_new_tokens,
        top_p=fill_default(request.top_p, defaults.top_p),
        top_k=fill_default(request.top_k, defaults.top_k) or -1,
        min_p=request.min_p or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=fill_default(request.repetition_penalty, 1.0),
        stop=[text for text in stop or () if text] or None,
        stop_token_ids=request.stop_token_ids or None,
        sampling_seed=fold_seed_into_engine_range(request.seed),
        logit_bias=request.logit_bias or None,
        min_new_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        **_read_grammar(request, tool_choice),
    )


_VLLM_GRAMMARS = {"json": "json_schema", "regex": "regex", "choice": "ebnf", "grammar": "ebnf"}
"""SGLang's names of grammars by vLLM's, which stand alone or after `guided_`."""


def _read_grammar(request: SharedCompletionParams, tool_choice: ToolChoice) -> dict[str, Any]:
    form, vllm = request.response_format, request.structured_outputs
    schema = None
    if form is not None and form.type != "text":
        raw_schema = form.json_schema.schema if form.json_schema else {"type": "object"}
        schema = encode_text_schema(raw_schema, tool_choice)
    params: list[tuple[str, str, Any]] = [
        ("response_format", "json_schema", schema),
        ("regex", "regex", request.regex),
        ("ebnf", "ebnf", request.ebnf),
    ]
    for name, kind in _VLLM_GRAMMARS.items():
        params.append((f"guided_{name}", kind, getattr(request, f"guided_{name}")))
        if vllm is not None:
            params.append((f"structured_outputs.{name}", kind, getattr(vllm, name)))
    grammars = [param for param in params if param[2] is not None and param[2] != []]
    names = [name for name, _, _ in grammars]
    if len(names) > 1 or (names and tool_choice.must_call):
        other = " and ".join(names[1:]) or "tool_choice"
        raise ProxyRequestError(400, f"{names[0]} and {other} cannot be combined", key=names[0])
    return {
        kind: write_choice_grammar(value) if isinstance(value, list) else write_json_text(value)
        for _, kind, value in grammars
    }


DONE_EVENT = b"data: [DONE]\n\n"
_ERROR_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def format_error_fields(refusal: ProxyRequestError) -> dict[str, Any]:
    default = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {
        "message": refusal.message,
        "type": _ERROR_TYPE_BY_STATUS.get(refusal.status, default),
        "param": refusal.param,
        "code": refusal.code,
    }


def format_error(refusal: ProxyRequestError) -> bytes:
    return msgspec.json.encode({"error": format_error_fields(refusal)})


class ChoiceExchange(Exchange):
    def __init__(
        self,
        request: SharedCompletionParams,
        call: ModelCall,
        session: Session,
        model: ServedModel,
        id_prefix: str,
        kind: str,
    ) -> None:
        super().__init__(call, model, id_prefix, request.stream)
        self._tree = session.tree
        self._has_ids = bool(request.return_token_ids)
        self._counts_usage = request.wants_stream_usage
        self.frame: dict[str, Any] = {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_at,
            "model": model.name,
        }
        """First fields of the reply, or of each chunk of it."""

    @abstractmethod
    def format_choice(self, answer: RecordedChoice) -> dict[str, Any]:
        pass

    @abstractmethod
    def format_delta(self, delta: ReplyChunk) -> bytes:
        pass

    @abstractmethod
    def format_choice_end(self, answer: RecordedChoice) -> bytes:
        pass

    def build_token_id_fields(self, answer: RecordedChoice) -> dict[str, Any]:
        """Return the token ids of prompt and reply under vLLM's names, if they were requested."""
        if not self._has_ids:
            return {}
        call = answer.interaction
        parent = self._tree[call.parent_id] if call.parent_id is not None else None
        new_ids_json_inside = format_ids_as_json_inside(unpack_ids(call.new_ids).tolist())
        prompt = (
            b"[" + self._tree.build_sequence_ids_json_inside(parent, new_ids_json_inside) + b"]"
        )
        output_ids = answer.generation.output_ids
        return {"prompt_token_ids": msgspec.Raw(prompt), "token_ids": output_ids}

    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        choices = [self.format_choice(answer) for answer in answers]
        return msgspec.json.encode(
            {**self.frame, "choices": choices, "usage": format_usage(answers)}
        )

    async def stream_events(self, reply_stream: ReplyStream) -> AsyncGenerator[bytes, None]:
        answers: list[RecordedChoice] = []
        async for event in reply_stream:
            if isinstance(event, ReplyChunk):
                yield self.format_delta(event)
            else:
                answers.append(event)
                yield self.format_choice_end(event)
        usage = self.format_event(usage=format_usage(answers)) if self._counts_usage else b""
        yield usage + DONE_EVENT

    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        return b"data: " + format_error(refusal) + b"\n\n" + DONE_EVENT

    def format_event(self, *choices: dict[str, Any], **more: Any) -> bytes:
        content = {**self.frame, "choices": choices, **more}
        return b"data: " + msgspec.json.encode(content) + b"\n\n"


def format_usage(answers: Sequence[RecordedChoice]) -> dict[str, Any]:
    prompt_tokens = answers[0].interaction.prompt_tokens
    completion_tokens = sum(len(answer.generation.output_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answers[0].generation.cached_tokens},
    }


def format_logprobs(
    generated: Generation | TokenChunk, encoder: TokenEncoder
) -> list[dict[str, Any]]:
    """Format token, log-probability, bytes and likeliest alternatives of each token.

    The stop token is left out as in OpenAI's replies, because it is not part of the text.
    """
    tops: Iterable[TopLogprobs] = generated.top_logprobs or [None] * len(generated.output_ids)
    tokens = [*zip(generated.output_ids, generated.logprobs, tops, strict=True)]
    return [
        {
            **_format_token_logprob(token, logprob, encoder),
            "top_logprobs": [
                _format_token_logprob(other, value, encoder) for value, other, _ in top or ()
            ],
        }
        for token, logprob, top in tokens[: len(tokens) - generated.ends_with_stop_token]
    ]


def _format_token_logprob(token: int, logprob: float, encoder: TokenEncoder) -> dict[str, Any]:
    text = encoder.decode([token])
    # A token that is part of a character has no text of its own.
    utf8 = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": utf8}


def format_models(model: str, context_tokens: int) -> bytes:
    page = {"first_id": model, "last_id": model, "has_more": False}
    card = _build_model_card(model, context_tokens)
    return msgspec.json.encode({"object": "list", "data": [card], **page})


def format_model(model: str, context_tokens: int) -> bytes:
    return msgspec.json.encode(_build_model_card(model, context_tokens))


def _build_model_card(model: str, context_tokens: int) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "areal_hpc",
        "max_model_len": context_tokens,
        "type": "model",
        "display_name": model,
        "created_at": "1970-01-01T00:00:00Z",
    }
