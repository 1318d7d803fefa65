"""Generators of tasks, some with the mistakes of a first version."""

from collections.abc import Iterator
from typing import Any


def questions(size: int, seed: int, terms: int, words: int = 5) -> Iterator[dict[str, Any]]:
    """Tasks whose prompts have so many words."""
    for number in range(size):
        text = " ".join(["word"] * words)
        yield {"messages": [{"role": "user", "content": f"{number} {text}"}], "answer": "1"}


def breaking(size: int, seed: int, terms: int) -> Iterator[dict[str, Any]]:
    """Raises in a function that it calls."""
    for number in range(size):
        yield make_task(number)


def make_task(number: int) -> dict[str, Any]:
    """Looks a column up that is not there."""
    row = {"question": number}
    return {"messages": row["qestion"]}
