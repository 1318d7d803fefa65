"""The example agents before the real model, whose words a grammar chooses."""

import json
import re
from functools import partial
from typing import Any

from tests.integration.agents.theatre import Scene, Theatre

QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]


def saying(pattern: str) -> dict[str, Any]:
    """Arguments of an agent whose model can say nothing else."""
    return {"extra_body": {"regex": pattern}}


def episode(agent: str, task: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    data = {"messages": QUESTION, **task}
    return {"workflow": f"examples.{agent}", "data": data, "kwargs": kwargs}


def test_the_examples_are_played_and_rewarded(theatre: Theatre) -> None:
    tests = {"cases": [{"input": "", "output": "3"}]}
    three, program = saying(r"\\boxed\{3\}"), saying("```python\nprint\\(3\\)\n```")
    sorting_reward = {"reward": "examples.custom.sorting:sorting_reward"}
    math, sorted_numbers = "mathematics.agents.MathAgent", {"numbers": [3, 2, 1]}
    once, again, code, sorting = theatre.play(
        "main",
        episode(math, {"answer": "3"}, **three),
        episode("mathematics.agents.MultiTurnMathAgent", {"answer": "4"}, max_turns=2, **three),
        episode("coding.agent.CodeAgent", {"tests": tests}, **program),
        episode(math, sorted_numbers, **sorting_reward, **saying("1 3 2")),
    )
    assert (once.heard, once.rewards) == (["\\boxed{3}"], [1.0])
    assert again.heard == ["\\boxed{3}", "\\boxed{3}"]
    assert again.rewards == [0.0]
    assert again.turns[1].parent_id == again.turns[0].interaction_id
    first, second = code.turns
    assert "It ended with code 0:\n3\n" in second.new_messages[-1]["content"]
    assert second.parent_id == first.interaction_id
    assert code.rewards == [1.0]
    assert sorting.rewards == [round(1 / 3, 6)]


def calling(name: str, arguments: str) -> dict[str, Any]:
    """A first request in whose reply the model can but call a tool, with these arguments."""
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    literally = re.sub(r"[{}+]", r"\\\g<0>", call)
    return saying(f"<tool_call>\n{literally}\n</tool_call>")


def test_the_examples_with_tools_are_told_what_their_tools_found(theatre: Theatre) -> None:
    passages = [{"title": "Kiel", "text": "A port."}]
    search = partial(episode, "search.agent.SearchAgent")
    computed, found, own = theatre.play(
        "main",
        episode(
            "tools.calculator.CalculatorAgent",
            {"answer": "3"},
            first_request=calling("calculate", '{"expression": "1 + 2"}'),
            **saying(r"\\boxed\{3\}"),
        ),
        search(
            {"answer": "SGLang"},
            first_request=calling("search", '{"query": "radix cache"}'),
            **saying("It is SGLang"),
        ),
        search(
            {"answer": "Kiel", "passages": passages},
            first_request=calling("search", '{"query": "a port"}'),
            **saying("Ulm"),
        ),
    )
    told = [assert_called_once(scene) for scene in (computed, found, own)]
    assert told[0] == "3"
    assert "radix cache keeps the keys" in told[1]
    assert json.loads(told[2]) == passages
    assert [scene.rewards for scene in (computed, found, own)] == [[1.0], [1.0], [0.0]]


def assert_called_once(scene: Scene) -> str:
    """What the model was told of its call, which it goes on from in one row."""
    call, answer = scene.turns
    assert (answer.parent_id, answer.reuse) == (call.interaction_id, "reused")
    assert scene.heard == [scene.said(answer)]
    (row,) = scene.rows
    assert scene.trained(row) == call.num_output_tokens + answer.num_output_tokens
    (told,) = [one["content"] for one in answer.new_messages if one["role"] == "tool"]
    return str(told)
