"""OpenAI reply format: errors, usage, log-probabilities, model list."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from areal_hpc.errors import RequestError
from areal_hpc.proxy.completion.streaming import RecordedReply, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.dialect import EventStream
from areal_hpc.proxy.engine.generation import TopLogprobs
from areal_hpc.session.chat_template import TokenEncoder

DONE = b"data: [DONE]\n\n"
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def format_error_fields(refusal: RequestError) -> dict[str, Any]:
    """A refusal as OpenAI's error object."""
    default = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {
        "message": refusal.message,
        "type": _KINDS.get(refusal.status, default),
        "param": refusal.param,
        "code": refusal.code,
    }


def format_error(refusal: RequestError) -> bytes:
    """A refusal in OpenAI's shape."""
    return msgspec.json.encode({"error": format_error_fields(refusal)})


def format_usage(answers: Sequence[RecordedReply]) -> dict[str, Any]:
    """The `usage` of a (chat) completion: its prompt once, all of its choices."""
    prompt_tokens = answers[0].interaction.prompt_tokens
    completion_tokens = sum(len(answer.generation.output_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answers[0].generation.cached_tokens},
    }


class ChoiceEvents(EventStream):
    """The server-sent events of a (chat) completion: its choices' chunks, usage, the end mark."""

    def __init__(self, live: ReplyStream, frame: dict[str, Any], *, counts_usage: bool) -> None:
        super().__init__(live)
        self._frame = frame
        """What every chunk begins with."""
        self._counts_usage = counts_usage
        self._answers: list[RecordedReply] = []
        self._done = False

    @abstractmethod
    def delta(self, delta: ReplyChunk) -> bytes:
        """What says a part of a choice."""

    @abstractmethod
    def end(self, answer: RecordedReply) -> bytes:
        """What says that a choice has ended."""

    async def __anext__(self) -> bytes:
        if self._done:
            raise StopAsyncIteration
        try:
            happened = await anext(self._live)
        except StopAsyncIteration:
            self._done = True
            return self._usage_event() + DONE
        if isinstance(happened, ReplyChunk):
            return self.delta(happened)
        self._answers.append(happened)
        return self.end(happened)

    def broken(self, refusal: RequestError) -> bytes:
        """What says that the stream ends early."""
        return b"data: " + format_error(refusal) + b"\n\n" + DONE

    def chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        """One event."""
        content = {**self._frame, "choices": choices, **more}
        return b"data: " + msgspec.json.encode(content) + b"\n\n"

    def _usage_event(self) -> bytes:
        return self.chunk(usage=format_usage(self._answers)) if self._counts_usage else b""


def format_logprobs(
    output_ids: Sequence[int],
    logprobs: Sequence[float],
    top_logprobs: Sequence[TopLogprobs],
    encoder: TokenEncoder,
) -> list[dict[str, Any]]:
    """Token, log-probability, bytes and likeliest alternatives of each token."""
    tops: Iterable[TopLogprobs] = top_logprobs or [None] * len(output_ids)
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


def format_models(model: str, context_tokens: int) -> bytes:
    """The JSON body of GET /v1/models: OpenAI's fields and Anthropic's, which share the address."""
    card = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "areal_hpc",
        "max_model_len": context_tokens,
        "type": "model",
        "display_name": model,
        "created_at": "1970-01-01T00:00:00Z",
    }
    page = {"first_id": model, "last_id": model, "has_more": False}
    return msgspec.json.encode({"object": "list", "data": [card], **page})
