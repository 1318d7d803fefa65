"""OpenAI Chat Completions: answers -> response, whole or as server-sent events."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_hpc.proxy.dialects.chat import ChatRequest, parse
from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.dialects.openai_forms import (
    DONE,
    error,
    error_event,
    event,
    token_logprobs,
    usage,
)
from areal_hpc.proxy.live import Answer, Delta, LiveAnswers
from areal_hpc.proxy.model_call import ModelCall, ServedModel
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.replies import CallPart, Said
from areal_hpc.proxy.sessions import Session
from areal_hpc.session.template import TokenEncoder


class ChatExchange:
    """A ChatCompletion that is asked for."""

    def __init__(self, request: ChatRequest, call: ModelCall, model: ServedModel) -> None:
        self.call = call
        self.answer_id = f"chatcmpl-{os.urandom(14).hex()}"
        self.streams = bool(request.stream)
        self._request = request
        self._model = model

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """The JSON body of a ChatCompletion."""
        encoder = self._model.encoder
        return msgspec.json.encode(
            {
                "id": self.answer_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._model.name,
                "choices": [_choice(self._request, answer, encoder) for answer in answers],
                "usage": usage(answers),
            }
        )

    def events(self, live: LiveAnswers) -> ChatEvents:
        """The chunks of a ChatCompletion."""
        return ChatEvents(
            self.answer_id, self._model.name, self._request, live, self._model.encoder
        )


def _read(body: bytes, session: Session, model: ServedModel) -> ChatExchange:
    return ChatExchange(*parse(body, session.request.sampling, model), model)


CHAT = Dialect(ChatRequest, _read, error)


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
        self._counts_usage = request.counts_usage
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

    def broken(self, refusal: RequestRefused) -> bytes:
        """What says that the stream ends early."""
        return error_event(refusal)

    def _delta(self, delta: Delta) -> bytes:
        piece = delta.piece
        logprobs = None
        if self._with_logprobs and piece.output_ids:
            content = token_logprobs(
                piece.output_ids, piece.logprobs, piece.top_logprobs, self._encoder
            )
            logprobs = {"content": content, "refusal": None}
        chunks = [self._beginning(delta.choice)]
        if delta.said.text or delta.said.reasoning or logprobs is not None:
            fields = _delta_fields(delta.said)
            chunks.append(self._chunk(delta.choice, fields, None, logprobs))
        for call in delta.said.calls:  # one a chunk, as OpenAI does: some clients read no second
            chunks.append(self._chunk(delta.choice, {"tool_calls": [_call_delta(call)]}, None))
        return b"".join(chunks)

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
        return event({**self._frame, "choices": [chunk]})

    def _usage_event(self) -> bytes:
        if not self._counts_usage:
            return b""
        return event({**self._frame, "choices": [], "usage": usage(self._answers)})


def _delta_fields(said: Said) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if said.reasoning:
        fields["reasoning_content"] = said.reasoning
    if said.text:
        fields["content"] = said.text
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
        content = token_logprobs(
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
