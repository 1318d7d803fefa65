"""Replies of Google's generateContent, whole or streamed, its errors and its model cards."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal

import msgspec

from areal_hpc.errors import PromptTooLongError, ProxyRequestError
from areal_hpc.proxy.completion.reply import RecordedChoice, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.dialect import BlockChange, BlockSplitter, ContentBlock, Exchange
from areal_hpc.proxy.dialects.google import GenerateContentRequest, build_model_call
from areal_hpc.proxy.dialects.validation import decode_arguments, format_call_as_text
from areal_hpc.proxy.engine.generation import Generation, TokenChunk
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.sessions.store import Session

Delivery = Literal["whole", "events", "array"]
"""Form of a reply: one body, server-sent events, or a JSON array whose elements are streamed."""

_FINISH_REASONS = {"stop": "STOP", "length": "MAX_TOKENS"}
_STATUS_BY_CODE = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Names of google.rpc.Code."""


class GenerateContentExchange(Exchange):
    ping_event = b"\r\n"
    """Empty line, because the Python SDK takes a comment for the beginning of an error."""

    def __init__(
        self,
        request: GenerateContentRequest,
        session: Session,
        model: ServedModel,
        delivery: Delivery,
    ) -> None:
        call = build_model_call(request, session.request.sampling, model)
        super().__init__(call, model, "gen_", delivery != "whole")
        self._is_array = delivery == "array"
        if self._is_array:
            self.stream_media_type = "application/json"
        config = request.config
        thinking = config.thinking_config
        self._shows_thoughts = thinking is not None and bool(thinking.include_thoughts)
        self._with_logprobs = bool(config.response_logprobs)
        self._sent = 0
        """Number of elements of the stream that were sent."""

    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        candidates = []
        for answer in answers:
            splitter = BlockSplitter()
            parts = self._build_parts((*splitter.add_delta(answer.content), *splitter.finish()))
            candidate = self._build_candidate_content(answer.choice, parts, answer.generation)
            candidates.append(candidate | self._build_candidate_end(answer))
        return msgspec.json.encode(self._build_response(candidates, self._format_usage(answers)))

    async def stream_events(self, reply_stream: ReplyStream) -> AsyncGenerator[bytes, None]:
        """Yield chunks with parts in each: clients drop a turn in which one has none."""
        splitters = [BlockSplitter() for _ in range(reply_stream.choices)]
        answers: list[RecordedChoice] = []
        async for event in reply_stream:
            splitter = splitters[event.choice]
            if isinstance(event, ReplyChunk):
                parts = self._build_parts(splitter.add_delta(event.content))
                if parts or (self._with_logprobs and event.tokens.output_ids):
                    candidate = self._build_candidate_content(event.choice, parts, event.tokens)
                    yield self._format_stream_element(self._build_response([candidate]))
                continue
            answers.append(event)
            parts = self._build_parts(splitter.finish())
            candidate = self._build_candidate_content(event.choice, parts)
            candidate |= self._build_candidate_end(event)
            usage = self._format_usage(answers) if len(answers) == reply_stream.choices else None
            yield self._format_stream_element(self._build_response([candidate], usage))
        if self._is_array:
            yield b"]"

    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        return self._format_stream_element(_build_error_status(refusal)) + (
            b"]" if self._is_array else b""
        )

    def _format_stream_element(self, content: dict[str, Any]) -> bytes:
        body = msgspec.json.encode(content)
        self._sent += 1
        if not self._is_array:
            return b"data: " + body + b"\r\n\r\n"
        return (b"[" if self._sent == 1 else b",\r\n") + body

    def _build_response(
        self, candidates: Sequence[dict[str, Any]], usage: dict[str, int] | None = None
    ) -> dict[str, Any]:
        frame = {"modelVersion": self.model.name, "responseId": self.answer_id}
        metadata = {"usageMetadata": usage} if usage is not None else {}
        return {"candidates": candidates, **metadata, **frame}

    def _build_parts(self, changes: Iterable[BlockChange]) -> list[dict[str, Any]]:
        """Build parts of changed blocks. A call is sent when it is complete, as an object."""
        parts: list[dict[str, Any]] = []
        for kind, block, text in changes:
            if kind == "end" and block.kind == "call":
                parts.append(_build_part(block))
            elif kind == "add" and block.kind == "text":
                parts.append({"text": text})
            elif kind == "add" and block.kind == "reasoning" and self._shows_thoughts:
                parts.append({"text": text, "thought": True})
        return parts

    def _build_candidate_content(
        self,
        choice_index: int,
        parts: list[dict[str, Any]],
        generated: Generation | TokenChunk | None = None,
    ) -> dict[str, Any]:
        content = {"role": "model", "parts": parts or [{"text": ""}]}
        fields: dict[str, Any] = {"content": content, "index": choice_index}
        if self._with_logprobs and generated is not None:
            fields["logprobsResult"] = self._format_logprobs(generated)
        return fields

    def _build_candidate_end(self, answer: RecordedChoice) -> dict[str, Any]:
        generation = answer.generation
        fields: dict[str, Any] = {
            "finishReason": _FINISH_REASONS.get(generation.finish_reason, "OTHER")
        }
        if self._with_logprobs and generation.logprobs:
            fields["avgLogprobs"] = sum(generation.logprobs) / len(generation.logprobs)
        return fields

    def _format_logprobs(self, generated: Generation | TokenChunk) -> dict[str, Any]:
        chosen = zip(generated.output_ids, generated.logprobs, strict=True)
        tops = generated.top_logprobs or ()
        return {
            "chosenCandidates": [self._format_token(token, logprob) for token, logprob in chosen],
            "topCandidates": [
                {"candidates": [self._format_token(token, logprob) for logprob, token, _ in top]}
                for top in (candidates or () for candidates in tops)
            ],
        }

    def _format_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.model.encoder.decode([token])
        return {"token": text, "tokenId": token, "logProbability": logprob}

    def _format_usage(self, answers: Sequence[RecordedChoice]) -> dict[str, int]:
        prompt = answers[0].interaction.prompt_tokens
        sampled = sum(len(answer.generation.output_ids) for answer in answers)
        encode = self.model.encoder.encode
        thoughts = sum(
            min(len(encode(answer.content.reasoning)), len(answer.generation.output_ids))
            for answer in answers
            if answer.content.reasoning
        )
        return {
            "promptTokenCount": prompt,
            "candidatesTokenCount": sampled - thoughts,
            "thoughtsTokenCount": thoughts,
            "cachedContentTokenCount": answers[0].generation.cached_tokens,
            "totalTokenCount": prompt + sampled,
        }


def _build_part(block: ContentBlock) -> dict[str, Any]:
    arguments = block.text or "{}"
    if decode_arguments(arguments) is None:
        return {"text": format_call_as_text(block.name, block.text)}
    call = {"id": block.call_id, "name": block.name, "args": msgspec.Raw(arguments.encode())}
    return {"functionCall": call}


def _build_error_status(refusal: ProxyRequestError) -> dict[str, Any]:
    default = "INTERNAL" if refusal.status >= 500 else "INVALID_ARGUMENT"
    status = _STATUS_BY_CODE.get(refusal.status, default)
    problem = refusal.message
    message = f"{refusal.param}: {problem}" if refusal.param else problem
    if isinstance(refusal, PromptTooLongError):  # clients look for these words
        most_tokens = min(refusal.context_tokens, refusal.prompt_tokens - 1)  # a reply has one
        message = problem = (
            f"The input token count ({refusal.prompt_tokens}) exceeds the maximum number of "
            f"tokens allowed ({most_tokens})."
        )
    fields: dict[str, Any] = {"code": refusal.status, "message": message, "status": status}
    if refusal.param:
        kind = "type.googleapis.com/google.rpc.BadRequest"
        violations = [{"field": refusal.param, "description": problem}]
        fields["details"] = [{"@type": kind, "fieldViolations": violations}]
    return {"error": fields}


def format_error(refusal: ProxyRequestError) -> bytes:
    return msgspec.json.encode(_build_error_status(refusal))


def build_model_card(model_name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "name": f"models/{model_name}",
        "baseModelId": model_name,
        "version": "1",
        "displayName": model.name,
        "inputTokenLimit": model.context_tokens,
        "outputTokenLimit": model.context_tokens,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
        "thinking": model.reasoning_parser is not None,
    }
