"""Anthropic Messages replies, whole or streamed."""

import hashlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec

from areal_hpc.errors import PromptTooLongError, ProxyRequestError
from areal_hpc.proxy.completion.streaming import RecordedChoice, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.anthropic.request import MessagesRequest, build_model_call
from areal_hpc.proxy.dialects.blocks import (
    BlockChange,
    BlockSplitter,
    ContentBlock,
    split_into_blocks,
)
from areal_hpc.proxy.dialects.dialect import Dialect, Exchange, format_named_event
from areal_hpc.proxy.engine.model_call import ReplyContent, ReplyToolCall, ServedModel
from areal_hpc.proxy.sessions.store import Session

_ERROR_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DELTA_FORMAT_BY_KIND = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class _MessagesExchange(Exchange):
    ping_event = format_named_event({"type": "ping"})

    def __init__(self, request: MessagesRequest, session: Session, model: ServedModel) -> None:
        call = build_model_call(request, session.request.sampling, model)
        super().__init__(call, model, "msg_", request.stream)
        self._frame: dict[str, Any] = {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        (answer,) = answers
        blocks = split_into_blocks(_move_invalid_calls_to_text(answer.said))
        content = [_format_block(block) for block in blocks]
        ending = {**_build_stop_fields(answer, blocks), "usage": _format_usage(answer)}
        return msgspec.json.encode({**self._frame, "content": content, **ending})

    async def stream_events(self, reply_stream: ReplyStream) -> AsyncGenerator[bytes, None]:
        reader = BlockSplitter()
        usage = {"input_tokens": reply_stream.prompt_tokens, "output_tokens": 0}
        message = {**self._frame, "usage": usage}
        beginning = format_named_event({"type": "message_start", "message": message})
        async for happened in reply_stream:
            if isinstance(happened, ReplyChunk):
                yield beginning + _format_block_changes(
                    reader.add_delta(_move_invalid_calls_to_text(happened.said))
                )
            else:
                rest = _format_block_changes(reader.finish())
                ending = {
                    "delta": _build_stop_fields(happened, reader.blocks),
                    "usage": _format_usage(happened),
                }
                end = format_named_event({"type": "message_delta", **ending})
                yield beginning + rest + end + format_named_event({"type": "message_stop"})
            beginning = b""

    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        return format_named_event(_build_error_fields(refusal))


def _move_invalid_calls_to_text(reply: ReplyContent) -> ReplyContent:
    calls: list[ReplyToolCall] = []
    text = reply.text
    for call in reply.calls:
        try:
            is_object = isinstance(msgspec.json.decode(call.arguments), dict)
        except (msgspec.DecodeError, RecursionError):
            is_object = False
        if is_object:
            calls.append(call)
        else:
            text += f'{{"name": {msgspec.json.encode(call.name).decode()}, '
            text += f'"arguments": {call.arguments}}}'
    return reply if len(calls) == len(reply.calls) else ReplyContent(text, reply.reasoning, calls)


def _format_block(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {
            "type": "thinking",
            "thinking": block.text,
            "signature": _make_reasoning_signature(block),
        }
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    tool_use = {"type": "tool_use", "id": block.call_id, "name": block.name}
    return {**tool_use, "input": msgspec.Raw(block.text.encode())}


def _make_reasoning_signature(block: ContentBlock) -> str:
    return hashlib.blake2b(block.text.encode(), digest_size=16).hexdigest()


def _format_block_changes(changes: Iterable[BlockChange]) -> bytes:
    parts = []
    for kind, block, text in changes:
        place = {"index": block.index}
        if kind == "begin":
            event = {
                "type": "content_block_start",
                **place,
                "content_block": _format_block_start(block),
            }
            parts.append(format_named_event(event))
        elif kind == "add":
            delta_type, field = _DELTA_FORMAT_BY_KIND[block.kind]
            delta = {"type": delta_type, field: text}
            event = {"type": "content_block_delta", **place, "delta": delta}
            parts.append(format_named_event(event))
        else:
            if block.kind == "reasoning":
                delta = {"type": "signature_delta", "signature": _make_reasoning_signature(block)}
                event = {"type": "content_block_delta", **place, "delta": delta}
                parts.append(format_named_event(event))
            parts.append(format_named_event({"type": "content_block_stop", **place}))
    return b"".join(parts)


def _format_block_start(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _build_stop_fields(answer: RecordedChoice, blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    generation = answer.generation
    if generation.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if any(block.kind == "call" for block in blocks):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if generation.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": generation.stop_text}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _format_usage(answer: RecordedChoice) -> dict[str, Any]:
    cached_tokens = answer.generation.cached_tokens
    return {
        "input_tokens": answer.interaction.prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": len(answer.generation.output_ids),
    }


def _build_error_fields(refusal: ProxyRequestError) -> dict[str, Any]:
    default = "api_error" if refusal.status >= 500 else "invalid_request_error"
    message = f"{refusal.param}: {refusal.message}" if refusal.param else refusal.message
    if isinstance(refusal, PromptTooLongError):  # Claude Code knows it by the whole of these words
        most_tokens = min(refusal.context_tokens, refusal.prompt_tokens - 1)  # a reply has one
        message = f"prompt is too long: {refusal.prompt_tokens} tokens > {most_tokens} maximum"
    kind = _ERROR_TYPE_BY_STATUS.get(refusal.status, default)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _format_error(refusal: ProxyRequestError) -> bytes:
    return msgspec.json.encode(_build_error_fields(refusal))


MESSAGES_DIALECT = Dialect(MessagesRequest, _MessagesExchange, _format_error)
