"""Everything of one's own: tasks from a function, a reward, and a filter of groups.

`recipes/gpu8_own_task_qwen2.5_1.5b.yaml` names them.
"""

import random
from collections.abc import Iterator
from typing import Any


def tasks(size: int, seed: int, numbers: int = 5) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for _ in range(size):
        unsorted = [rng.randrange(100) for _ in range(numbers)]
        question = f"Sort in ascending order, with spaces between: {' '.join(map(str, unsorted))}"
        yield {"messages": [{"role": "user", "content": question}], "numbers": unsorted}


def sorting_reward(
    prompt: Any,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    numbers: list[int],
    **task: Any,
) -> float:
    """The share of places that hold the right number; 0 if the last line is no list of numbers."""
    last = (completions.strip().splitlines() or [""])[-1]
    try:
        given = [int(word) for word in last.split()]
    except ValueError:
        return 0.0
    if len(given) != len(numbers):
        return 0.0
    return sum(a == b for a, b in zip(given, sorted(numbers), strict=True)) / len(numbers)


def neither_too_easy_nor_too_hard(group: dict[str, Any]) -> bool:
    """Train a group only if its mean reward is between 0.05 and 0.95."""
    return bool(0.05 < group["rewards"].mean() < 0.95)
