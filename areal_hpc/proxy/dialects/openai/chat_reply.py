"""OpenAI Chat Completions replies, whole or streamed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_hpc.proxy.completion.streaming import RecordedReply, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.dialects.openai.chat_request import ChatRequest, parse
from areal_hpc.proxy.dialects.openai.format import (
    ChoiceEvents,
    format_error,
    format_logprobs,
    format_usage,
)
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.engine.reply import ReplyDelta, ToolCallDelta
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import TokenEncoder


class ChatExchange:
    """A ChatCompletion that is asked for."""

    def __init__(self, request: ChatRequest, call: ModelCall, model: ServedModel) -> None:
        self.call = call
        self.answer_id = f"chatcmpl-{os.urandom(14).hex()}"
        self.streams = bool(request.stream)
        self._request = request
        self._model = model

    def whole(self, answers: Sequence[RecordedReply]) -> bytes:
        """The JSON body of a ChatCompletion."""
        encoder = self._model.encoder
        return msgspec.json.encode(
            {
                "id": self.answer_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._model.name,
                "choices": [_choice(self._request, answer, encoder) for answer in answers],
                "usage": format_usage(answers),
            }
        )

    def events(self, live: ReplyStream) -> ChatEventStream:
        """The chunks of a ChatCompletion."""
        return ChatEventStream(
            self.answer_id, self._model.name, self._request, live, self._model.encoder
        )


def _read(body: bytes, session: Session, model: ServedModel) -> ChatExchange:
    return ChatExchange(*parse(body, session.request.sampling, model), model)


CHAT = Dialect(ChatRequest, _read, format_error)


class ChatEventStream(ChoiceEvents):
    """The server-sent events of a streamed ChatCompletion."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        request: ChatRequest,
        live: ReplyStream,
        encoder: TokenEncoder,
    ) -> None:
        frame = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            **({"usage": None} if request.counts_usage else {}),
        }
        super().__init__(live, frame, counts_usage=request.counts_usage)
        self._with_logprobs = bool(request.logprobs)
        self._encoder = encoder
        self._begun: set[int] = set()

    def delta(self, delta: ReplyChunk) -> bytes:
        """One chunk, and one for each tool call."""
        piece = delta.piece
        logprobs = None
        if self._with_logprobs and piece.output_ids:
            content = format_logprobs(
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

    def end(self, answer: RecordedReply) -> bytes:
        """A chunk without text."""
        return self._beginning(answer.choice) + self._chunk(answer.choice, {}, answer.finish_reason)

    def _beginning(self, choice: int) -> bytes:
        """The first chunk of a choice, once."""
        if choice in self._begun:
            return b""
        self._begun.add(choice)
        return self._chunk(choice, {"role": "assistant", "content": ""}, None)

    def _chunk(
        self, choice: int, delta: dict[str, Any], reason: str | None, logprobs: Any = None
    ) -> bytes:
        return self.chunk(
            {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        )


def _delta_fields(said: ReplyDelta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if said.reasoning:
        fields["reasoning_content"] = said.reasoning
    if said.text:
        fields["content"] = said.text
    return fields


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.call_id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _choice(request: ChatRequest, answer: RecordedReply, encoder: TokenEncoder) -> dict[str, Any]:
    generation = answer.generation
    logprobs = None
    if request.logprobs:
        content = format_logprobs(
            generation.output_ids, generation.logprobs, generation.top_logprobs, encoder
        )
        logprobs = {"content": content, "refusal": None}
    return {
        "index": answer.choice,
        "finish_reason": answer.finish_reason,
        "logprobs": logprobs,
        "message": _message(answer.said),
    }


def _message(said: ReplyDelta) -> dict[str, Any]:
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
