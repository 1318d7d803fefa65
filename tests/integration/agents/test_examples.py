"""The example agents before the real model, whose words a grammar chooses."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.integration.agents.theatre import Scene, Theatre

QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]


def saying(pattern: str) -> dict[str, Any]:
    """Arguments of an agent whose model can say nothing else."""
    return {"extra_body": {"regex": pattern}}


def rewards(scene: Scene) -> list[float]:
    return [round(row.reward, 6) for row in scene.rows]


def test_the_examples_are_played_and_rewarded(theatre: Theatre) -> None:
    mathematics = {"messages": QUESTION, "answer": "3"}
    program = {"messages": QUESTION, "tests": {"cases": [{"input": "", "output": "3"}]}}
    three = r"\\boxed\{3\}"
    once, again, code, sorting = theatre.play(
        "agents",
        {
            "workflow": "examples.mathematics.agents.MathAgent",
            "data": mathematics,
            "kwargs": saying(three),
        },
        {
            "workflow": "examples.mathematics.agents.MultiTurnMathAgent",
            "data": {**mathematics, "answer": "4"},
            "kwargs": {"max_turns": 2, **saying(three)},
        },
        {
            "workflow": "examples.coding.agent.CodeAgent",
            "data": program,
            "kwargs": saying("```python\nprint\\(3\\)\n```"),
        },
        {
            "workflow": "examples.mathematics.agents.MathAgent",
            "data": {"messages": QUESTION, "numbers": [3, 2, 1]},
            "kwargs": {"reward": "examples.custom.sorting:sorting_reward", **saying("1 3 2")},
        },
    )
    assert (once.heard, rewards(once)) == (["\\boxed{3}"], [1.0])
    assert again.heard == ["\\boxed{3}", "\\boxed{3}"]
    assert rewards(again) == [0.0]
    assert again.turns[1].parent_id == again.turns[0].interaction_id
    first, second = code.turns
    assert "It ended with code 0:\n3\n" in second.new_messages[-1]["content"]
    assert second.parent_id == first.interaction_id
    assert rewards(code) == [1.0]
    assert rewards(sorting) == [round(1 / 3, 6)]


def calling(name: str, arguments: str) -> dict[str, Any]:
    """A first request in whose reply the model can but call a tool, with these arguments."""
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    literally = re.sub(r"[{}+]", r"\\\g<0>", call)
    return saying(f"<tool_call>\n{literally}\n</tool_call>")


def test_the_examples_with_tools_are_told_what_their_tools_found(theatre: Theatre) -> None:
    cases = {"messages": QUESTION, "answer": "3"}
    search, passages = "examples.search.agent.SearchAgent", [{"title": "Kiel", "text": "A port."}]
    computed, found, own = theatre.play(
        "agents",
        {
            "workflow": "examples.tools.calculator.CalculatorAgent",
            "data": cases,
            "kwargs": {
                "first_request": calling("calculate", '{"expression": "1 + 2"}'),
                **saying(r"\\boxed\{3\}"),
            },
        },
        {
            "workflow": search,
            "data": {"messages": QUESTION, "answer": "SGLang"},
            "kwargs": {
                "first_request": calling("search", '{"query": "radix cache"}'),
                **saying("It is SGLang"),
            },
        },
        {
            "workflow": search,
            "data": {"messages": QUESTION, "answer": "Kiel", "passages": passages},
            "kwargs": {
                "first_request": calling("search", '{"query": "a port"}'),
                **saying("Ulm"),
            },
        },
    )
    told = [assert_called_once(scene) for scene in (computed, found, own)]
    assert told[0] == "3"
    assert "radix cache keeps the keys" in told[1]
    assert json.loads(told[2]) == passages
    assert [rewards(scene) for scene in (computed, found, own)] == [[1.0], [1.0], [0.0]]


def assert_called_once(scene: Scene) -> str:
    """What the model was told of its call, which it goes on from in one row."""
    call, answer = scene.turns
    assert (answer.parent_id, answer.reuse) == (call.interaction_id, "reused")
    assert scene.heard == [scene.said(answer)]
    (row,) = scene.rows
    assert scene.trained(row) == call.output_tokens + answer.output_tokens
    (told,) = [one["content"] for one in answer.new_messages if one["role"] == "tool"]
    return str(told)
