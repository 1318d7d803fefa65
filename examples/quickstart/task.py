"""Sums of one-digit numbers, held-out ones, and demonstrations of two ways to answer."""

import itertools
import random
import zlib
from collections.abc import Iterator
from typing import Any

HELD_OUT_SHARE = 16
"""One question in so many is held out, chosen by a checksum of its text: whatever the sizes and
seeds, training and demonstrations never see a question of the held-out set."""
MOST_HELD_OUT = 2000


def train_tasks(size: int, seed: int, terms: int = 5) -> Iterator[dict[str, Any]]:
    """Tasks to learn from."""
    return itertools.islice(_tasks(3 * seed, terms, held_out=False), size)


def valid_tasks(size: int, seed: int, terms: int = 5) -> Iterator[dict[str, Any]]:
    """Held-out tasks, no question twice."""
    if size > MOST_HELD_OUT:
        raise ValueError(f"size={size}: at most {MOST_HELD_OUT} questions are held out")
    seen: set[str] = set()
    for task in _tasks(3 * seed + 1, terms, held_out=True):
        question = task["messages"][0]["content"]
        if len(seen) == size:
            return
        if question not in seen:
            seen.add(question)
            yield task


def demonstrations(
    size: int, seed: int, p_work: float = 0.42, terms: int = 5
) -> Iterator[dict[str, Any]]:
    """Correct conversations: a share of `p_work` shows its work, the others only answer.

    After the SFT stage the model is right nine times in ten when it shows its work, one or two
    in ten when it does not, and mostly it does not. Reinforcement learning finds that out.
    """
    rng = random.Random(seed)
    for task in itertools.islice(_tasks(3 * seed + 2, terms, held_out=False), size):
        work = f"{show_work(task['metadata']['expression'])}. " if rng.random() < p_work else ""
        reply = {"role": "assistant", "content": f"{work}Answer: {task['answer']}"}
        yield {"messages": [*task["messages"], reply]}


def verify(text: str, task: dict[str, Any]) -> bool:
    """Check that the text after the last `Answer:` is the right number."""
    _, marker, answer = text.rpartition("Answer:")
    try:
        return bool(marker) and float(answer) == float(task["answer"])
    except ValueError:
        return False


def show_work(expression: str) -> str:
    """`3 - 5 + 0 + 6` as `3-5=-2,-2+0=-2,-2+6=4`."""
    first, *rest = expression.split()
    value, steps = int(first), []
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        result = value + int(number) if operator == "+" else value - int(number)
        steps.append(f"{value}{operator}{number}={result}")
        value = result
    return ",".join(steps)


def _tasks(stream: int, terms: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Endless tasks of one stream, of one side of the split."""
    rng = random.Random(stream)
    while True:
        value = rng.randint(0, 9)
        expression = str(value)
        for _ in range(terms - 1):
            operator, number = rng.choice("+-"), rng.randint(0, 9)
            value += number if operator == "+" else -number
            expression += f" {operator} {number}"
        question = f"State the final answer to the following arithmetic problem: {expression} ="
        if (zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0) == held_out:
            yield {
                "messages": [{"role": "user", "content": question}],
                "answer": str(value),
                "metadata": {"expression": expression},
            }
