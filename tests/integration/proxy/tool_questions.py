"""A question with a tool, what the model says to it, and what it then reads."""

from typing import Any

from areal_hpc.wire.ledger import TicketRef
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
ADD = {"name": "add", "description": "Add two numbers."}
CHAT_TOOL: Any = {"type": "function", "function": {**ADD, "parameters": PARAMETERS}}
FUNCTION: Any = {"type": "function", **ADD, "parameters": PARAMETERS, "strict": None}
"""Of Responses."""
TOOL: Any = {**ADD, "input_schema": PARAMETERS}
"""Of Messages."""
QUESTION: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3, "y": 4}}\n</tool_call>'
THOUGHT = "<think>\nadd them\n</think>\n\n"
ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": QUESTION, "tools": [CHAT_TOOL]},
    "messages": {"messages": QUESTION, "tools": [TOOL], "max_tokens": 200},
    "responses": {"input": QUESTION, "tools": [FUNCTION]},
}
"""A question with the tool, by its route."""
UNKNOWN = '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"x": 3\n</tool_call>'
NO_OBJECT = "<tool_call>\n5\n</tool_call>"
"""SGLang's parser raises at it."""


def says(stage: Stage, text: str, piece_tokens: int = 1) -> str:
    """Let the model say `text`; the key of a new session."""
    stage.sglang.requests.clear()
    stage.sglang.script = lambda request: Script(text, piece_tokens=piece_tokens)
    stage.sglang.incremental = True
    return stage.open_session(TicketRef(1, 0))[1]


def assert_spliced(stage: Stage, said: str, calls: int = 1) -> None:
    """The last request reads what the model said, token by token, and then how it was answered."""
    before, after = (request["input_ids"] for request in stage.sglang.requests[-2:])
    own = stage.tokenizer.encode(said + "<|im_end|>").ids
    assert after[: len(before) + len(own)] == before + own
    rest = stage.tokenizer.decode(after[len(before) + len(own) :], skip_special_tokens=False)
    tail = "<|im_start|>tool\n7<|im_end|>\n" * calls or "<|im_start|>user\nSure?<|im_end|>\n"
    assert rest == f"\n{tail}<|im_start|>assistant\n"


def ask(stage: Stage, route: str, said: str, **more: Any) -> dict[str, Any]:
    """The request that reaches the model when it is asked with its tool."""
    key = says(stage, said)
    answer = stage.post(f"/v1/{route}", {**ASKED[route], **more}, key)
    assert answer.status_code == 200, answer.text
    (request,) = stage.sglang.requests
    return request
