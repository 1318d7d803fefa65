"""OpenAI Chat Completions: answers -> response, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from areal_hpc.proxy.dialects.chat import ChatRequest
from areal_hpc.proxy.generation import Alternatives
from areal_hpc.proxy.live import Answer, Delta, LiveAnswers
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.replies import CallPart, Said
from areal_hpc.session.template import TokenEncoder

DONE = b"data: [DONE]\n\n"


def response(
    answer_id: str, model: str, request: ChatRequest, answers: list[Answer], encoder: TokenEncoder
) -> bytes:
    """The JSON body of a ChatCompletion."""
    return msgspec.json.encode(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [_choice(request, answer, encoder) for answer in answers],
            "usage": _usage(answers),
        }
    )


class ChatEvents:
    """The server-sent events of a streamed ChatCompletion.

    The event that ends a choice comes after its interaction is in the journal.
    """

    def __init__(
        self,
        answer_id: str,
        model: str,
        request: ChatRequest,
        live: LiveAnswers,
        encoder: TokenEncoder,
    ) -> None:
        options = request.stream_options
        self._counts_usage = options is not None and bool(options.include_usage)
        self._with_logprobs = bool(request.logprobs)
        self._frame: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        if self._counts_usage:
            self._frame["usage"] = None
        self._live = live
        self._encoder = encoder
        self._begun: set[int] = set()
        self._answers: list[Answer] = []
        self._done = False

    def __aiter__(self) -> ChatEvents:
        return self

    async def __anext__(self) -> bytes:
        if self._done:
            raise StopAsyncIteration
        try:
            event = await anext(self._live)
        except StopAsyncIteration:
            self._done = True
            return self._usage_event() + DONE
        if isinstance(event, Delta):
            return self._delta(event)
        self._answers.append(event)
        return self._beginning(event.choice) + self._chunk(event.choice, {}, event.finish_reason)

    def abandon(self) -> None:
        """The client has gone."""
        self._live.abandon()

    def _delta(self, delta: Delta) -> bytes:
        piece = delta.piece
        logprobs = None
        if self._with_logprobs and piece.output_ids:
            content = _token_logprobs(
                piece.output_ids, piece.logprobs, piece.top_logprobs, self._encoder
            )
            logprobs = {"content": content, "refusal": None}
        if not delta.said and logprobs is None:
            return self._beginning(delta.choice)
        fields = _delta_fields(delta.said)
        return self._beginning(delta.choice) + self._chunk(delta.choice, fields, None, logprobs)

    def _beginning(self, choice: int) -> bytes:
        """The first chunk of a choice, once."""
        if choice in self._begun:
            return b""
        self._begun.add(choice)
        return self._chunk(choice, {"role": "assistant", "content": ""}, None)

    def _chunk(
        self, choice: int, delta: dict[str, Any], reason: str | None, logprobs: Any = None
    ) -> bytes:
        chunk = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return _event({**self._frame, "choices": [chunk]})

    def _usage_event(self) -> bytes:
        if not self._counts_usage:
            return b""
        return _event({**self._frame, "choices": [], "usage": _usage(self._answers)})


def _event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _delta_fields(said: Said) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if said.reasoning:
        fields["reasoning_content"] = said.reasoning
    if said.text:
        fields["content"] = said.text
    if said.calls:
        fields["tool_calls"] = [_call_delta(call) for call in said.calls]
    return fields


def _call_delta(call: CallPart) -> dict[str, Any]:
    if not call.call_id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _choice(request: ChatRequest, answer: Answer, encoder: TokenEncoder) -> dict[str, Any]:
    generation = answer.generation
    logprobs = None
    if request.logprobs:
        content = _token_logprobs(
            generation.output_ids, generation.logprobs, generation.top_logprobs, encoder
        )
        logprobs = {"content": content, "refusal": None}
    return {
        "index": answer.choice,
        "finish_reason": answer.finish_reason,
        "logprobs": logprobs,
        "message": _message(answer.said),
    }


def _message(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in said.calls
        ]
    return message


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    prompt_tokens = answers[0].interaction.prompt_tokens
    completion_tokens = sum(len(answer.generation.output_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answers[0].generation.cached_tokens},
    }


def _token_logprobs(
    output_ids: Sequence[int],
    logprobs: Sequence[float],
    top_logprobs: Sequence[Alternatives],
    encoder: TokenEncoder,
) -> list[dict[str, Any]]:
    tops: Iterable[Alternatives] = top_logprobs or [None] * len(output_ids)
    return [
        {
            **_token(token, logprob, encoder),
            "top_logprobs": [_token(other, value, encoder) for value, other, _ in top or ()],
        }
        for token, logprob, top in zip(output_ids, logprobs, tops, strict=True)
    ]


def _token(token: int, logprob: float, encoder: TokenEncoder) -> dict[str, Any]:
    text = encoder.decode([token])
    # A token that is part of a character has no text of its own.
    utf8 = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": utf8}


def models(model: str, context_tokens: int) -> bytes:
    """The JSON body of GET /v1/models."""
    card = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "areal_hpc",
        "max_model_len": context_tokens,
    }
    return msgspec.json.encode({"object": "list", "data": [card]})


def error(refusal: RequestRefused) -> bytes:
    """A refusal in OpenAI's shape."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    default = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return msgspec.json.encode(
        {
            "error": {
                "message": refusal.message,
                "type": kinds.get(refusal.status, default),
                "param": refusal.param,
                "code": None,
            }
        }
    )


def error_event(refusal: RequestRefused) -> bytes:
    """A refusal after a stream has begun."""
    return b"data: " + error(refusal) + b"\n\n" + DONE
