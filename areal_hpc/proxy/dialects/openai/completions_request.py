"""OpenAI legacy Completions requests.

The prompt is text or token ids and is read as it is; one prompt a request. Every parameter is
honoured, a hint, or refused by name, as in `chat`. Without `max_tokens` the session's own limit
holds.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_hpc.errors import RequestError
from areal_hpc.proxy.dialects.hints import hints_in
from areal_hpc.proxy.dialects.openai.sampling import (
    CompletionSampling,
    build_sampling_params,
    check_consistency,
)
from areal_hpc.proxy.dialects.validation import check_token_ids, decode
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.wire.proxy import SamplingDefaults


class CompletionRequest(CompletionSampling, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions, as far as this proxy can honour it."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)


def parse(
    body: bytes, defaults: SamplingDefaults, model: ServedModel
) -> tuple[CompletionRequest, ModelCall]:
    """Validate a request.

    Args:
        body: As received.
        defaults: Apply where the request is silent.
        model: Who will answer.

    Raises:
        RequestError: 400, naming the parameter that is wrong or cannot be honoured.
    """
    request = decode(_decoder, body)
    check_consistency(request, model)
    if request.echo:
        raise RequestError(400, "echo is not supported", key="echo")
    if request.suffix:
        raise RequestError(400, "suffix is not supported", key="suffix")
    if request.best_of not in (None, request.n or 1):
        raise RequestError(400, "best_of must equal n", key="best_of")
    return request, ModelCall(
        messages=(),
        tools=None,
        variables=None,
        sampling=build_sampling_params(request, defaults, ToolChoice(), request.max_tokens or 0),
        prompt_key="prompt",
        prompt=_prompt(request.prompt, model),
        n=request.n or 1,
        top_logprobs=request.logprobs or 0,
        ignored=[*hints_in(request)],
    )


def _prompt(prompt: str | list[Any], model: ServedModel) -> str | list[int]:
    """The one text, or the token ids, that a prompt holds."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if any(isinstance(part, str | list) for part in prompt):
        raise RequestError(400, "only one prompt per request is supported", key="prompt")
    if any(type(part) is not int for part in prompt):
        raise RequestError(400, "prompt must be a string or a list of token ids", key="prompt")
    check_token_ids(model, "prompt", prompt)
    return prompt
