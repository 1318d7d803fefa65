"""Tasks for mini-swe-agent: write down how many pieces of an item are in stock.

The stock list is in the folder. A guess is right once in ninety times, a look at the list always.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_hpc.wire.agent_reward import Reward

FOLDER = Path(__file__).resolve().parent / "folder"
"""Source of each episode's copy: `stock.txt`, and `agent.yaml`, the harness's settings."""
ITEMS = range(100, 1000)
COUNTS = range(10, 100)
HELD_OUT_EVERY = 9
"""Item 108 and each ninth after it is held out: neither training nor demonstrations name it."""
SYSTEM_TEXT = "Reply with one bash command."
"""System prompt of `agent.yaml`, for the demonstrations."""
LOOK = "grep"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command at which mini-swe-agent ends."""


def train_tasks(size: int, seed: int) -> Iterator[dict[str, Any]]:
    items = [item for item in ITEMS if item % HELD_OUT_EVERY]
    rng = random.Random(seed)
    return (_make_task(rng.choice(items)) for _ in range(size))


def valid_tasks(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Held-out tasks, no item twice."""
    items = [item for item in ITEMS if not item % HELD_OUT_EVERY]
    if size > len(items):
        raise ValueError(f"size={size}: {len(items)} items are held out")
    return map(_make_task, random.Random(seed).sample(items, size))


def demonstrations(size: int, seed: int, p_look: float) -> Iterator[dict[str, Any]]:
    """Conversations, with made-up counts: a share of `p_look` looks first, the others guess.

    Every second one shows only what follows a look: the model has to copy what it read. Which of
    the two beginnings earns a reward, no demonstration says.
    """
    rng = random.Random(seed)
    for number, task in enumerate(train_tasks(size, seed + 1)):
        item, count = task["item"], rng.choice(COUNTS)
        beginning = [{"role": "system", "content": SYSTEM_TEXT}, *task["messages"]]
        look = {"role": "assistant", "content": _in_a_block(f"{LOOK} ^{item} stock.txt")}
        submit = _in_a_block(f"echo {count} > answer.txt; {SUBMIT}")
        write = {"role": "assistant", "content": submit}
        if number % 2:
            seen = {"role": "user", "content": f"{item} {count}"}
            yield {"prompt": [*beginning, look, seen], "completion": [write]}
        else:
            yield {"messages": [*beginning, look if rng.random() < p_look else write]}


def judge(
    *, folder: Path, diff: str, exit_code: int, timed_out: bool, log: str, data: dict[str, Any]
) -> Reward:
    """1 if `answer.txt` has the count of the stock list."""
    answer = folder / "answer.txt"
    written = answer.read_text(errors="replace").strip() if answer.is_file() else ""
    is_right = written == read_stock()[data["item"]]
    return Reward(float(is_right), metrics={"looked": float(f"{LOOK} ^" in log)})


def read_stock() -> dict[int, str]:
    """Counts by item."""
    lines = (FOLDER / "stock.txt").read_text().splitlines()
    return {int(item): count for item, count in (line.split() for line in lines)}


def _make_task(item: int) -> dict[str, Any]:
    text = f"Write the stock of item {item} to answer.txt."
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "folder": str(FOLDER), "item": item}


def _in_a_block(command: str) -> str:
    return f"```bash\n{command}\n```"
