"""OpenAI Chat Completions replies, whole or streamed."""

from typing import Any

from areal_hpc.proxy.completion.streaming import RecordedChoice, ReplyChunk
from areal_hpc.proxy.dialects.custom_tools import read_custom_input
from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.dialects.openai.chat_request import ChatRequest, build_model_call
from areal_hpc.proxy.dialects.openai.format import ChoiceExchange, format_error, format_logprobs
from areal_hpc.proxy.engine.generation import Generation, TokenChunk
from areal_hpc.proxy.engine.model_call import ReplyToolCall, ServedModel, format_tool_call
from areal_hpc.proxy.sessions.store import Session


class _ChatExchange(ChoiceExchange):
    def __init__(self, request: ChatRequest, session: Session, model: ServedModel) -> None:
        call = build_model_call(request, session.request.sampling, model)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(request, call, session, model, "chatcmpl-", kind)
        if request.wants_stream_usage:
            self.frame["usage"] = None
        self._with_logprobs = bool(request.logprobs)
        self._has_old_functions = request.has_old_functions
        self._custom_tools = request.get_custom_tool_names()
        self._custom_calls: set[tuple[int, int]] = set()
        """Choice and index of the calls of these that were begun."""
        self._begun: set[int] = set()

    def format_choice(self, answer: RecordedChoice) -> dict[str, Any]:
        said = answer.said
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["content"] = said.text or None
            if self._has_old_functions:
                first = said.calls[0]
                message["function_call"] = {"name": first.name, "arguments": first.arguments}
            else:
                message["tool_calls"] = [self._format_call(call) for call in said.calls]
        return {
            "index": answer.choice,
            "finish_reason": self._get_finish_reason(answer),
            "logprobs": self._format_logprobs(answer.generation),
            "message": message,
            **self.build_token_id_fields(answer),
        }

    def _format_call(self, call: ReplyToolCall) -> dict[str, Any]:
        if call.name in self._custom_tools:
            called = {"name": call.name, "input": read_custom_input(call.arguments)}
            return {"id": call.call_id, "type": "custom", "custom": called}
        return format_tool_call(call.call_id, call.name, call.arguments)

    def _get_finish_reason(self, answer: RecordedChoice) -> str:
        reason = answer.finish_reason
        return "function_call" if self._has_old_functions and reason == "tool_calls" else reason

    def format_delta(self, delta: ReplyChunk) -> bytes:
        said, chunks = delta.said, [self._format_first_chunk_once(delta.choice)]
        logprobs = self._format_logprobs(delta.piece)
        logprobs = logprobs if logprobs and logprobs["content"] else None
        if said.text or said.reasoning or logprobs:
            fields = {"reasoning_content": said.reasoning, "content": said.text}
            given = {name: text for name, text in fields.items() if text}
            chunks.append(self._format_chunk(delta.choice, given, logprobs=logprobs))
        for call in said.calls:  # one a chunk, as OpenAI does: some clients read no second
            if not self._is_custom_call(delta.choice, call):
                chunks.append(self._format_chunk(delta.choice, self._format_call_delta(call)))
        return b"".join(chunks)

    def _is_custom_call(self, choice_index: int, call: ReplyToolCall) -> bool:
        if call.name in self._custom_tools:
            self._custom_calls.add((choice_index, call.index))
        return (choice_index, call.index) in self._custom_calls

    def _format_call_delta(self, call: ReplyToolCall) -> dict[str, Any]:
        part: dict[str, Any] = {"function": {"arguments": call.arguments}}
        if call.call_id:  # the first part of it
            part = self._format_call(call)
        if self._has_old_functions:
            return {"function_call": part["function"]}
        return {"tool_calls": [{"index": call.index, **part}]}

    def format_choice_end(self, answer: RecordedChoice) -> bytes:
        ids = self.build_token_id_fields(answer)
        choice = {"index": answer.choice, "delta": {}, "logprobs": None, **ids}
        chunks = [self._format_first_chunk_once(answer.choice)]
        for call in answer.said.calls:
            if call.name in self._custom_tools:
                chunks.append(self._format_chunk(answer.choice, self._format_call_delta(call)))
        end = self.format_event({**choice, "finish_reason": self._get_finish_reason(answer)})
        return b"".join([*chunks, end])

    def _format_first_chunk_once(self, choice_index: int) -> bytes:
        if choice_index in self._begun:
            return b""
        self._begun.add(choice_index)
        return self._format_chunk(choice_index, {"role": "assistant", "content": ""})

    def _format_chunk(
        self, choice_index: int, delta: dict[str, Any], logprobs: Any = None
    ) -> bytes:
        return self.format_event(
            {"index": choice_index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        )

    def _format_logprobs(self, generated: Generation | TokenChunk) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": format_logprobs(generated, self.model.encoder), "refusal": None}


CHAT_DIALECT = Dialect(ChatRequest, _ChatExchange, format_error)
