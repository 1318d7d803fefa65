"""OpenAI reply format: errors, choices, usage, log-probabilities, model list."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.streaming import RecordedChoice, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.dialect import Exchange
from areal_hpc.proxy.dialects.openai.sampling import SharedCompletionParams
from areal_hpc.proxy.engine.generation import Generation, TokenChunk, TopLogprobs
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.tree import format_ids_as_json_inside, unpack_ids

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
    """A (chat) completion that is asked for: its choices, usage; streamed, then the end mark."""

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
        """Fields with which the reply, or each chunk of it, begins."""

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
        """The token ids of prompt and reply, if they were asked for, under vLLM's names."""
        if not self._has_ids:
            return {}
        one = answer.interaction
        parent = self._tree[one.parent_id] if one.parent_id is not None else None
        new_ids_json_inside = format_ids_as_json_inside(unpack_ids(one.new_ids).tolist())
        prompt = (
            b"[" + self._tree.build_sequence_ids_json_inside(parent, new_ids_json_inside) + b"]"
        )
        said = answer.generation.output_ids
        return {"prompt_token_ids": msgspec.Raw(prompt), "token_ids": said}

    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        choices = [self.format_choice(answer) for answer in answers]
        return msgspec.json.encode(
            {**self.frame, "choices": choices, "usage": format_usage(answers)}
        )

    async def stream_events(self, reply_stream: ReplyStream) -> AsyncGenerator[bytes, None]:
        answers: list[RecordedChoice] = []
        async for happened in reply_stream:
            if isinstance(happened, ReplyChunk):
                yield self.format_delta(happened)
            else:
                answers.append(happened)
                yield self.format_choice_end(happened)
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
    """Token, log-probability, bytes and likeliest alternatives of each token.

    They join to the text: the stop token, which is none of it, is left out as in OpenAI's.
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
