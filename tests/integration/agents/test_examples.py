"""The example agents before the real model, whose words a grammar chooses."""

from __future__ import annotations

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
