"""OpenAI Responses replies, whole or streamed."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.streaming import RecordedChoice, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.blocks import (
    BlockChange,
    BlockSplitter,
    ContentBlock,
    split_into_blocks,
)
from areal_hpc.proxy.dialects.dialect import Dialect, Exchange, format_named_event
from areal_hpc.proxy.dialects.openai.format import (
    format_error,
    format_error_fields,
    format_logprobs,
)
from areal_hpc.proxy.dialects.openai_responses.output_items import (
    ID_PREFIX_WITH_INSTRUCTIONS,
    ID_PREFIX_WITHOUT_INSTRUCTIONS,
    build_item_id,
    format_content_part,
    format_item,
    format_response,
    format_usage,
    is_custom_call,
)
from areal_hpc.proxy.dialects.openai_responses.request import ResponsesRequest, build_model_call
from areal_hpc.proxy.engine.generation import Generation, TokenChunk
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.sessions.store import Session

_EVENT_PREFIX_BY_KIND = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class _ResponsesExchange(Exchange):
    def __init__(self, request: ResponsesRequest, session: Session, model: ServedModel) -> None:
        call, self._tools = build_model_call(request, session, model)
        prefix = (
            ID_PREFIX_WITH_INSTRUCTIONS if request.instructions else ID_PREFIX_WITHOUT_INSTRUCTIONS
        )
        super().__init__(call, model, prefix, request.stream)
        self._request = request
        self._session = session
        self._reader = BlockSplitter()
        self._sent = 0
        self._tokens: list[dict[str, Any]] = []
        self._shown = 0
        """Number of the tokens that have come with their text."""
        self._end_status = "completed"
        """Of the item that ends now."""

    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        (answer,) = answers
        return self._finish_response(answer, split_into_blocks(answer.said))

    async def stream_events(self, reply_stream: ReplyStream) -> AsyncGenerator[bytes, None]:
        async for happened in reply_stream:
            beginning = self._format_beginning_once()
            if isinstance(happened, ReplyChunk):
                self._tokens += self._format_logprobs(happened.piece)
                yield beginning + b"".join(
                    map(self._format_block_change, self._reader.add_delta(happened.said))
                )
            else:
                self._end_status = _get_status(happened)
                rest = b"".join(map(self._format_block_change, self._reader.finish()))
                response = msgspec.Raw(self._finish_response(happened, self._reader.blocks))
                end = self._format_event(f"response.{self._end_status}", response=response)
                yield beginning + rest + end

    def _format_beginning_once(self) -> bytes:
        if self._sent:
            return b""
        frame = self._build_response("in_progress")
        return self._format_event("response.created", response=frame) + self._format_event(
            "response.in_progress", response=frame
        )

    def format_ping(self) -> bytes:
        return self._format_beginning_once() or self._format_event("keepalive")

    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        fields = format_error_fields(refusal)
        code = fields["code"] or fields["type"]
        named = {"code": code, "message": fields["message"], "param": fields["param"]}
        return self._format_event("error", error=fields, **named)

    def _build_response(
        self, status: str, output: Sequence[dict[str, Any]] = (), usage: Any = None
    ) -> dict[str, Any]:
        request, sampling = self._request, self.call.sampling
        return format_response(
            self.answer_id,
            self.created_at,
            status,
            self.model.name,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=None,
            output=output,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning=request.reasoning or {"effort": None, "summary": None},
            service_tier="default",
            store=self.call.is_retrievable,
            temperature=sampling.temperature,
            text=request.text or {"format": {"type": "text"}},
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation="disabled",
            usage=usage,
            user=request.user,
            metadata={k: v for k, v in (request.metadata or {}).items() if v is not None},
        )

    def _finish_response(self, answer: RecordedChoice, blocks: Sequence[ContentBlock]) -> bytes:
        status, logprobs = _get_status(answer), self._format_logprobs(answer.generation)
        *ended, last = blocks
        output = [
            *(self._format_item(block, "completed", logprobs) for block in ended),
            self._format_item(last, status, logprobs),
        ]
        reasoning = answer.said.reasoning
        reasoning_tokens = len(self.model.encoder.encode(reasoning)) if reasoning else 0
        usage = format_usage(answer.interaction, reasoning_tokens)
        body = msgspec.json.encode(self._build_response(status, output, usage))
        if self.call.is_retrievable:
            self._session.keep_response(self.answer_id, body)
        return body

    def _format_logprobs(self, generated: Generation | TokenChunk) -> list[dict[str, Any]]:
        return (
            format_logprobs(generated, self.model.encoder) if self._request.wants_logprobs else []
        )

    def _format_item(
        self, block: ContentBlock, status: str, logprobs: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        return format_item(self.answer_id, block, status, logprobs, self._tools)

    def _format_event(self, kind: str, /, **fields: Any) -> bytes:
        event = format_named_event({"type": kind, **fields, "sequence_number": self._sent})
        self._sent += 1
        return event

    def _format_block_change(self, change: BlockChange) -> bytes:
        kind, block, text = change
        if kind == "begin":
            return self._format_block_start(block)
        if kind == "add":
            return self._format_block_delta(block, text)
        return self._format_block_end(block)

    def _build_location_fields(self, block: ContentBlock) -> dict[str, Any]:
        place = {
            "item_id": build_item_id(self.answer_id, block, self._tools),
            "output_index": block.index,
        }
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _format_block_start(self, block: ContentBlock) -> bytes:
        item = self._format_item(block, "in_progress", [])
        begun = self._format_event(
            "response.output_item.added", output_index=block.index, item=item
        )
        if block.kind == "call":
            return begun
        place, empty = self._build_location_fields(block), format_content_part(block, "", [])
        return begun + self._format_event("response.content_part.added", **place, part=empty)

    def _format_block_delta(self, block: ContentBlock, text: str) -> bytes:
        if is_custom_call(block, self._tools):  # its text is known once its JSON is whole
            return b""
        fields = {**self._build_location_fields(block), "delta": text}
        if block.kind == "text":
            fields["logprobs"] = self._tokens[self._shown :]
            self._shown = len(self._tokens)
        return self._format_event(f"{_EVENT_PREFIX_BY_KIND[block.kind]}.delta", **fields)

    def _format_block_end(self, block: ContentBlock) -> bytes:
        place, name = (
            self._build_location_fields(block),
            f"{_EVENT_PREFIX_BY_KIND[block.kind]}.done",
        )
        item = self._format_item(block, self._end_status, self._tokens)
        if is_custom_call(block, self._tools):
            name, text = "response.custom_tool_call_input", item["input"]
            ended = self._format_event(f"{name}.delta", **place, delta=text)
            ended += self._format_event(f"{name}.done", **place, input=text)
        elif block.kind == "call":
            ended = self._format_event(name, **place, name=item["name"], arguments=block.text)
        else:
            logprobs = {"logprobs": self._tokens} if block.kind == "text" else {}
            ended = self._format_event(name, **place, text=block.text, **logprobs)
            (whole,) = item["content"]
            ended += self._format_event("response.content_part.done", **place, part=whole)
        return ended + self._format_event(
            "response.output_item.done", output_index=block.index, item=item
        )


def _get_status(answer: RecordedChoice) -> str:
    return "incomplete" if answer.generation.finish_reason == "length" else "completed"


RESPONSES_DIALECT = Dialect(ResponsesRequest, _ResponsesExchange, format_error)
