"""Dialect of OpenAI's legacy Completions.

A request has one prompt, of text or token ids, which the model reads without a chat template.
Without `max_tokens` the session's limit applies.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from areal_hpc.errors import PromptTooLongError, ProxyRequestError
from areal_hpc.proxy.completion.reply import RecordedChoice, ReplyChunk
from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.dialects.openai import (
    ChoiceExchange,
    SharedCompletionParams,
    build_sampling_params,
    check_shared_params,
    format_error,
    format_logprobs,
    list_all_ignored_params,
)
from areal_hpc.proxy.dialects.parameters import EMPTY_VALUES, Refusal
from areal_hpc.proxy.dialects.validation import MAX_TOP_LOGPROBS, check_token_ids
from areal_hpc.proxy.engine.generation import Generation, TokenChunk
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel, ToolChoice
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.wire.proxy import SamplingDefaults


class CompletionRequest(SharedCompletionParams, forbid_unknown_fields=True, kw_only=True):
    refused: ClassVar[Mapping[str, Refusal]] = {
        **SharedCompletionParams.refused,
        "add_special_tokens": Refusal("give the token ids as the prompt", (True,)),
        "echo": Refusal("put the prompt before the reply yourself"),
        "functions": Refusal("use POST /chat/completions"),
        "function_call": Refusal("use POST /chat/completions", (*EMPTY_VALUES, "none", "auto")),
        "messages": Refusal("use POST /chat/completions"),
        "suffix": Refusal("the model goes on from a prompt; it fills no gaps"),
        "tools": Refusal("use POST /chat/completions"),
    }

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None


def _build_model_call(
    request: CompletionRequest, defaults: SamplingDefaults, model: ServedModel
) -> ModelCall:
    check_shared_params(request, model)
    if request.best_of not in (None, request.n or 1):
        hint = "rank the replies yourself"
        raise ProxyRequestError(400, "best_of must equal n", key="best_of", hint=hint)
    return ModelCall(
        messages=[],
        tools=None,
        template_variables=None,
        sampling=build_sampling_params(request, defaults, ToolChoice(), request.max_tokens or 0),
        prompt_param_name="prompt",
        raw_prompt=_read_prompt(request.prompt, model),
        n=request.n or 1,
        top_logprobs=request.logprobs or 0,
        ignored=list_all_ignored_params(request),
    )


def _read_prompt(prompt: str | list[Any], model: ServedModel) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if any(isinstance(part, str | list) for part in prompt):
        raise ProxyRequestError(400, "only one prompt per request is supported", key="prompt")
    if len(prompt) > model.context_tokens:  # before the loops over all parts
        raise PromptTooLongError(len(prompt), model.context_tokens, "prompt")
    if any(type(part) is not int for part in prompt):
        raise ProxyRequestError(400, "prompt must be a string or a list of token ids", key="prompt")
    check_token_ids(model, "prompt", prompt)
    return prompt


class _CompletionExchange(ChoiceExchange):
    def __init__(self, request: CompletionRequest, session: Session, model: ServedModel) -> None:
        call = _build_model_call(request, session.request.sampling, model)
        super().__init__(request, call, session, model, "cmpl-", "text_completion")
        self._with_logprobs = request.logprobs is not None
        self._token_chars: Counter[int] = Counter()
        """Number of characters of the tokens that were sent, by choice."""

    def format_choice(self, answer: RecordedChoice) -> dict[str, Any]:
        logprobs = self._format_logprobs(answer.generation, answer.choice)
        choice = _format_choice(answer.choice, answer.content.text, logprobs, answer.finish_reason)
        return {**choice, **self.build_token_id_fields(answer)}

    def format_delta(self, delta: ReplyChunk) -> bytes:
        logprobs = self._format_logprobs(delta.tokens, delta.choice)
        return self.format_event(_format_choice(delta.choice, delta.content.text, logprobs, None))

    def format_choice_end(self, answer: RecordedChoice) -> bytes:
        choice = _format_choice(answer.choice, "", None, answer.finish_reason)
        return self.format_event({**choice, **self.build_token_id_fields(answer)})

    def _format_logprobs(
        self, generated: Generation | TokenChunk, choice_index: int
    ) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        tokens = format_logprobs(generated, self.model.encoder)
        offsets = []
        for token in tokens:
            offsets.append(self._token_chars[choice_index])
            self._token_chars[choice_index] += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {item["token"]: item["logprob"] for item in (token, *token["top_logprobs"])}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _format_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


COMPLETIONS_DIALECT = Dialect(CompletionRequest, _CompletionExchange, format_error)
