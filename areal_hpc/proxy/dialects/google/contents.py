"""Google's contents as chat messages.

A reply comes back as the contents of its chunks, one after the other; together they are one message
of the assistant, as it was when the model said it.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.engine.model_call import format_tool_call
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message


class _FunctionCall(Struct):
    name: str
    args: dict[str, Any] | None = None
    id: str | None = None


class _FunctionResponse(Struct):
    name: str
    response: dict[str, Any] = {}
    id: str | None = None
    parts: list[Any] | None = None


class Part(Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None
    thought_signature: Any = None
    inline_data: Any = None
    file_data: Any = None
    executable_code: Any = None
    code_execution_result: Any = None


_UNREADABLE_PARTS = {
    "inlineData": "inline_data",
    "fileData": "file_data",
    "executableCode": "executable_code",
    "codeExecutionResult": "code_execution_result",
}


class Content(Struct, rename="camel"):
    parts: list[Part] | Part = []
    role: str | None = None

    @property
    def listed_parts(self) -> list[Part]:
        return self.parts if isinstance(self.parts, list) else [self.parts]


_USER_ROLES = (None, "", "user", "function")


def read_text_only_content(content: Content, key: str) -> str:
    """The text of a content that may hold nothing else."""
    texts = []
    for j, part in enumerate(content.listed_parts):
        _refuse_unreadable_part(part, f"{key}.parts[{j}]")
        if part.function_call is not None or part.function_response is not None:
            raise ProxyRequestError(400, "only text is supported here", key=f"{key}.parts[{j}]")
        texts.append(part.text or "")
    return "\n".join(text for text in texts if text)


def build_messages(contents: Sequence[Content]) -> Iterator[Message]:
    for i, content in enumerate(contents):
        if content.role not in (*_USER_ROLES, "model"):
            problem = f"expected role 'user' or 'model', got {content.role!r}"
            raise ProxyRequestError(400, problem, key=f"contents[{i}].role")
    if contents[-1].role == "model":
        raise ProxyRequestError(
            400,
            "a reply cannot be begun for the model: the last content must be the user's",
            key=f"contents[{len(contents) - 1}]",
        )
    calls = _UnansweredCalls()
    for is_model, group in groupby(enumerate(contents), lambda one: one[1].role == "model"):
        turns = [(f"contents[{i}]", content.listed_parts) for i, content in group]
        if is_model:
            yield normalize_chat_message(_build_assistant_message(turns, calls))
        else:
            for key, parts in turns:
                yield from map(normalize_chat_message, _build_user_messages(key, parts, calls))


class _UnansweredCalls:
    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        self._count = 0

    def add(self, call: _FunctionCall) -> str:
        call_id = call.id or self._make_call_id()
        self._open.append((call_id, call.name))
        return call_id

    def pop_answered_call_id(self, response: _FunctionResponse) -> str:
        same_id = [one for one in self._open if one[0] == response.id]
        for one in same_id or [one for one in self._open if one[1] == response.name]:
            self._open.remove(one)
            return one[0]
        return response.id or self._make_call_id()  # its call is no longer in the history

    def _make_call_id(self) -> str:
        self._count += 1
        return f"call_{self._count}"


def _build_assistant_message(
    turns: Sequence[tuple[str, Sequence[Part]]], calls: _UnansweredCalls
) -> Message:
    text, reasoning, called = "", "", []
    for key, parts in turns:
        for j, part in enumerate(parts):
            _refuse_unreadable_part(part, f"{key}.parts[{j}]")
            if part.function_response is not None:
                problem = "a model's content cannot contain a functionResponse"
                raise ProxyRequestError(400, problem, key=f"{key}.parts[{j}]")
            if part.thought:
                reasoning += part.text or ""
            else:
                text += part.text or ""
            if part.function_call is not None:
                call = part.function_call
                call_id = calls.add(call)
                called.append(format_tool_call(call_id, call.name, call.args or {}))
    fields = {"reasoning_content": reasoning or None, "tool_calls": called}
    return {"role": "assistant", "content": text, **fields}


def _build_user_messages(
    key: str, parts: Sequence[Part], calls: _UnansweredCalls
) -> Iterator[Message]:
    texts: list[str] = []
    for j, part in enumerate(parts):
        _refuse_unreadable_part(part, f"{key}.parts[{j}]")
        if part.function_call is not None:
            problem = "a user's content cannot contain a functionCall"
            raise ProxyRequestError(400, problem, key=f"{key}.parts[{j}]")
        if part.text is not None:
            texts.append(part.text)
        if part.function_response is not None:
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
                texts = []
            call_id = calls.pop_answered_call_id(part.function_response)
            result = _read_response_text(part.function_response.response)
            yield {"role": "tool", "tool_call_id": call_id, "content": result}
    if texts or not parts:
        yield {"role": "user", "content": "\n".join(texts)}


def _refuse_unreadable_part(part: Part, key: str) -> None:
    for name, attribute in _UNREADABLE_PARTS.items():
        if getattr(part, attribute) is not None:
            problem = f"parts with {name} are not supported: the model reads text alone"
            raise ProxyRequestError(400, problem, key=f"{key}.{name}")
    if part.function_response is not None and part.function_response.parts:
        problem = "the model reads text alone"
        raise ProxyRequestError(400, problem, key=f"{key}.functionResponse.parts")
    read = (part.text, part.function_call, part.function_response, part.thought_signature)
    if all(one is None for one in read):
        problem = "expected a part with text, functionCall or functionResponse"
        raise ProxyRequestError(400, problem, key=key)


def _read_response_text(response: dict[str, Any]) -> str:
    if [*response] == ["output"]:
        return _encode_result(response["output"])
    if [*response] == ["error"]:  # templates have no mark for a failure, so the text says it
        text = _encode_result(response["error"])
        return text if "error" in text.lower() else f"Error: {text}"
    return _encode_result(response)


def _encode_result(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
