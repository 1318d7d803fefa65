"""Anthropic Messages replies, whole or streamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from areal_hpc.errors import PromptTooLongError, RequestError
from areal_hpc.proxy.completion.streaming import RecordedReply, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.anthropic.request import MessagesRequest, parse
from areal_hpc.proxy.dialects.blocks import (
    BlockChange,
    BlockReader,
    ContentBlock,
    split_into_blocks,
)
from areal_hpc.proxy.dialects.dialect import Dialect, EventStream, format_named_event
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.engine.reply import ReplyDelta, ToolCallDelta
from areal_hpc.proxy.sessions.store import Session

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesExchange:
    """A Message that is asked for."""

    def __init__(self, request: MessagesRequest, call: ModelCall, model: ServedModel) -> None:
        self.call = call
        self.answer_id = f"msg_{os.urandom(14).hex()}"
        self.streams = bool(request.stream)
        self._model = model

    def whole(self, answers: Sequence[RecordedReply]) -> bytes:
        """The JSON body of a Message."""
        (answer,) = answers
        blocks = split_into_blocks(_as_objects(answer.said))
        return msgspec.json.encode(
            {
                **self.frame(),
                "content": [_content(block) for block in blocks],
                **_end(answer, blocks),
                "usage": _usage(answer),
            }
        )

    def frame(self) -> dict[str, Any]:
        """What is known of a Message before the model speaks."""
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def events(self, live: ReplyStream) -> MessageEventStream:
        """The events of a Message."""
        return MessageEventStream(self, live)


class MessageEventStream(EventStream):
    """The server-sent events of a streamed Message. `message_delta` tells the end."""

    def __init__(self, exchange: MessagesExchange, live: ReplyStream) -> None:
        super().__init__(live)
        self._exchange = exchange
        self._reader = BlockReader()
        self._begun = False

    async def __anext__(self) -> bytes:
        happened = await anext(self._live)
        beginning = b"" if self._begun else self._beginning()
        self._begun = True
        if isinstance(happened, ReplyChunk):
            return beginning + _events(self._reader.feed(_as_objects(happened.said)))
        rest = _events(self._reader.finish())
        return beginning + rest + self._end(happened)

    def broken(self, refusal: RequestError) -> bytes:
        """What says that the stream ends early."""
        return format_named_event(_error_fields(refusal))

    def _beginning(self) -> bytes:
        usage = {"input_tokens": self._live.prompt_tokens, "output_tokens": 0}
        message = {**self._exchange.frame(), "usage": usage}
        return format_named_event({"type": "message_start", "message": message})

    def _end(self, answer: RecordedReply) -> bytes:
        delta = _end(answer, self._reader.blocks)
        return format_named_event(
            {"type": "message_delta", "delta": delta, "usage": _usage(answer)}
        ) + format_named_event({"type": "message_stop"})


def _read(body: bytes, session: Session, model: ServedModel) -> MessagesExchange:
    request, call = parse(body, session.request.sampling, model)
    return MessagesExchange(request, call, model)


def _as_objects(said: ReplyDelta) -> ReplyDelta:
    """A reply whose calls all have objects for arguments; others stay text, as they are JSON."""
    calls: list[ToolCallDelta] = []
    text = said.text
    for call in said.calls:
        if _is_object(call.arguments):
            calls.append(call)
        else:
            text += f'{{"name": {msgspec.json.encode(call.name).decode()}, '
            text += f'"arguments": {call.arguments}}}'
    return said if len(calls) == len(said.calls) else ReplyDelta(text, said.reasoning, calls)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except msgspec.DecodeError:
        return False


def _content(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": _signature(block)}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    tool_use = {"type": "tool_use", "id": block.call_id, "name": block.name}
    return {**tool_use, "input": msgspec.Raw(block.text.encode())}


def _signature(block: ContentBlock) -> str:
    """Clients hand it back as it is and drop reasoning that has none. Nobody checks it."""
    return hashlib.blake2b(block.text.encode(), digest_size=16).hexdigest()


def _events(changes: Iterable[BlockChange]) -> bytes:
    parts = []
    for kind, block, text in changes:
        if kind == "begin":
            fields: dict[str, Any] = {"content_block": _begun(block)}
            parts.append(_block_event("content_block_start", block, fields))
        elif kind == "add":
            parts.append(_block_event("content_block_delta", block, {"delta": _delta(block, text)}))
        else:
            if block.kind == "reasoning":
                signed = {"type": "signature_delta", "signature": _signature(block)}
                parts.append(_block_event("content_block_delta", block, {"delta": signed}))
            parts.append(_block_event("content_block_stop", block, {}))
    return b"".join(parts)


def _block_event(name: str, block: ContentBlock, fields: dict[str, Any]) -> bytes:
    return format_named_event({"type": name, "index": block.index, **fields})


def _begun(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: ContentBlock, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _end(answer: RecordedReply, blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    """Why the reply ended."""
    generation = answer.generation
    if generation.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if any(block.kind == "call" for block in blocks):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if generation.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": generation.stop_text}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(answer: RecordedReply) -> dict[str, Any]:
    """Anthropic counts what came from the prefix cache apart from the other input."""
    cached_tokens = answer.generation.cached_tokens
    return {
        "input_tokens": answer.interaction.prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": len(answer.generation.output_ids),
    }


def format_token_count(tokens: int) -> bytes:
    """The JSON body of POST /v1/messages/count_tokens."""
    return msgspec.json.encode({"input_tokens": tokens})


def _error_fields(refusal: RequestError) -> dict[str, Any]:
    default = "api_error" if refusal.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(refusal.status, default)
    return {"type": "error", "error": {"type": kind, "message": _message(refusal)}}


def _message(refusal: RequestError) -> str:
    """The refusal with the parameter at fault in front, for which Anthropic has no field."""
    if isinstance(refusal, PromptTooLongError):  # Claude Code knows it by the whole of these words
        most_tokens = min(refusal.context_tokens, refusal.prompt_tokens - 1)  # a reply has one
        return f"prompt is too long: {refusal.prompt_tokens} tokens > {most_tokens} maximum"
    return f"{refusal.param}: {refusal.message}" if refusal.param else refusal.message


def format_error(refusal: RequestError) -> bytes:
    """A refusal in Anthropic's shape."""
    return msgspec.json.encode(_error_fields(refusal))


MESSAGES = Dialect(MessagesRequest, _read, format_error)
