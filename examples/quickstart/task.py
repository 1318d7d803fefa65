"""Sums of one-digit numbers, from reasoning-gym: a real generator with a real verifier."""

import itertools
import random
import zlib
from collections.abc import Iterator
from typing import Any

import reasoning_gym

HELD_OUT_SHARE = 16
"""One question in so many is held out, chosen by a checksum of its text: whatever the sizes and
seeds, training and demonstrations never see a question of the held-out set."""
MOST_HELD_OUT = 2000
SEED_STRIDE = 1_000_000_000
"""reasoning-gym seeds task i with seed + i, so streams must start far apart."""

_verify = reasoning_gym.get_score_answer_fn("chain_sum")


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
    """True if what follows the last `Answer:` is the right number, by reasoning-gym's verifier."""
    _, marker, answer = text.rpartition("Answer:")
    return bool(marker) and _verify(answer.strip(), task) == 1.0


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
    sums = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=terms,
        max_terms=terms,
        min_digits=1,
        max_digits=1,
        seed=stream * SEED_STRIDE,
        size=SEED_STRIDE,
    )
    for index in itertools.count():
        item = sums[index]
        if (zlib.crc32(item["question"].encode()) % HELD_OUT_SHARE == 0) == held_out:
            yield {
                "messages": [{"role": "user", "content": item["question"]}],
                "answer": item["answer"],
                "metadata": {"expression": item["metadata"]["expression"]},
            }
