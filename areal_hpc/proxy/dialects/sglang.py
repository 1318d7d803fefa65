"""SGLang's own routes: `/generate` for clients that record their calls, and tokenization.

The proxy writes the request to SGLang itself, from the fields and within the bounds below. SGLang
has many more fields: some kill its scheduler, and the name of a request may abort those of others.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.prompts import PromptBuilder
from areal_hpc.proxy.dialects.chat import (
    ChatMessage,
    build_tool_schemas,
    normalize_message,
)
from areal_hpc.proxy.dialects.validation import (
    MAX_TOP_LOGPROBS,
    Bias,
    Penalty,
    PositiveParam,
    Probability,
    Seed,
    Temperature,
    TopK,
    check_token_ids,
)
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.limits import refuse_costly_sampling
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, make_random_id
from areal_hpc.proxy.engine.sglang_client import GenerateRequest
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.tree import format_ids_as_json_inside
from areal_hpc.wire.trajectory import CallFacts


class GenerateSampling(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Part of SGLang's `sampling_params` that a client may set."""

    temperature: Temperature = 1.0
    max_new_tokens: PositiveParam = 128
    top_p: Probability = 1.0
    top_k: TopK = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    sampling_seed: Seed | None = None
    logit_bias: dict[str, Bias] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    skip_special_tokens: bool = True


class GenerateBody(Struct, forbid_unknown_fields=True, kw_only=True):
    input_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    sampling_params: GenerateSampling = GenerateSampling()
    return_logprob: bool = True
    """Accepted without effect: log-probabilities are always returned."""
    top_logprobs_num: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    require_reasoning: bool = False
    rid: str = ""
    """Accepted without effect: SGLang would abort all requests whose names begin with it."""
    stream: bool = False


def build_generate_request(body: GenerateBody, model: ServedModel) -> GenerateRequest:
    """Build the request of the proxy, whose reply fits the rest of the context."""
    if body.stream:
        raise ProxyRequestError(400, "streaming is not supported on /generate", key="stream")
    vocab_size = model.encoder.vocab_size
    if max(body.input_ids) >= vocab_size:  # an id outside the vocabulary would kill SGLang
        problem = f"expected ids below {vocab_size}, got {max(body.input_ids)}"
        raise ProxyRequestError(400, problem, key="input_ids")
    room = model.context_tokens - len(body.input_ids)
    if room < 1:
        problem = (
            f"the prompt's {len(body.input_ids)} tokens leave no room in the model's context of "
            f"{model.context_tokens} tokens"
        )
        raise ProxyRequestError(400, problem, key="input_ids")
    params = body.sampling_params
    check_token_ids(model, "sampling_params.stop_token_ids", params.stop_token_ids)
    check_token_ids(model, "sampling_params.logit_bias", params.logit_bias)
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    fields["stop"] = [params.stop] if isinstance(params.stop, str) else params.stop
    # A client in a driver does not know the context length of the replicas.
    fields["max_new_tokens"] = min(params.max_new_tokens, room)
    sampling = SamplingParams(**fields)
    if len(sampling.active_grammar_names) > 1:
        names = " and ".join(sampling.active_grammar_names)
        raise ProxyRequestError(400, f"{names} cannot be combined", key="sampling_params")
    refuse_costly_sampling(sampling)
    return GenerateRequest(
        rid=make_random_id(16),
        prompt_ids_json_inside=format_ids_as_json_inside(body.input_ids),
        sampling=sampling,
        top_logprobs=body.top_logprobs_num,
        reasons_first=body.require_reasoning,
    )


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    model: str = ""
    tools: list[msgspec.Raw] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Whether to add the tokens that the tokenizer puts around a text; true by default."""


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str = ""
    skip_special_tokens: bool = True


async def tokenize(
    prompts: PromptBuilder,
    model: ServedModel,
    session: Session,
    request: TokenizeRequest,
    facts: CallFacts,
) -> bytes:
    if (request.prompt is None) == (request.messages is None):
        raise ProxyRequestError(400, "give either a prompt or messages", key="prompt")
    if request.messages is not None and request.add_special_tokens is not None:
        problem = "add_special_tokens cannot be set with messages: the chat template decides"
        raise ProxyRequestError(400, problem, key="add_special_tokens")
    if request.prompt is not None and (request.tools or request.chat_template_kwargs):
        key = "tools" if request.tools else "chat_template_kwargs"
        raise ProxyRequestError(400, f"{key} go with messages", key=key)
    if request.prompt is not None:
        with_special = request.add_special_tokens is not False
        ids = await prompts.encode(request.prompt, "prompt", add_special_tokens=with_special)
        ids_json, count = format_ids_as_json_inside(ids), len(ids)
    else:
        call = ModelCall(
            messages=[normalize_message(m, i) for i, m in enumerate(request.messages or ())],
            tools=build_tool_schemas(request.tools, [], []) or None,
            template_variables=request.chat_template_kwargs or None,
            sampling=SamplingParams(1.0, 0),
            facts=facts,
        )
        ids_json, count = await prompts.build_prompt(session, call)
    tokens = msgspec.Raw(b"[" + ids_json + b"]")
    reply = {"tokens": tokens, "count": count, "max_model_len": model.context_tokens}
    return msgspec.json.encode(reply)


def detokenize(model: ServedModel, session: Session, request: DetokenizeRequest) -> bytes:
    if len(request.tokens) > model.context_tokens:
        problem = f"expected at most {model.context_tokens} tokens, got {len(request.tokens)}"
        raise ProxyRequestError(400, problem, key="tokens")
    check_token_ids(model, "tokens", request.tokens)
    skip = request.skip_special_tokens
    return msgspec.json.encode(
        {"text": model.encoder.decode(request.tokens, skip_special_tokens=skip)}
    )
