"""Question with a tool, a scripted reply of the model, and checks of the next prompt."""

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
"""Tool in the form of Responses."""
TOOL: Any = {**ADD, "input_schema": PARAMETERS}
"""Tool in the form of Messages."""
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
    """Make the model generate `text`, and return the key of a new session."""
    stage.sglang.requests.clear()
    stage.sglang.script = lambda request: Script(text, piece_tokens=piece_tokens)
    stage.sglang.incremental = True
    return stage.open_session(TicketRef(1, 0))[1]


def assert_spliced(stage: Stage, reply: str, calls: int = 1) -> None:
    """Assert that the last request has the reply token by token, then the answer to it."""
    before, after = (request["input_ids"] for request in stage.sglang.requests[-2:])
    own = stage.tokenizer.encode(reply + "<|im_end|>").ids
    assert after[: len(before) + len(own)] == before + own
    rest = stage.tokenizer.decode(after[len(before) + len(own) :], skip_special_tokens=False)
    tail = "<|im_start|>tool\n7<|im_end|>\n" * calls or "<|im_start|>user\nSure?<|im_end|>\n"
    assert rest == f"\n{tail}<|im_start|>assistant\n"


def ask(stage: Stage, route: str, reply: str, **more: Any) -> dict[str, Any]:
    """Return the model's request for a question with its tool."""
    key = says(stage, reply)
    answer = stage.post(f"/v1/{route}", {**ASKED[route], **more}, key)
    assert answer.status_code == 200, answer.text
    (request,) = stage.sglang.requests
    return request
