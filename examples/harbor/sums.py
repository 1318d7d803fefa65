"""Tasks in Harbor's format whose answer is a file with a sum: `python -m examples.harbor.sums OUT`.

The demonstrations know two commands for each: one writes what the shell reckons, one a sum that
the model has to know. Mostly they do the second, and right; a tiny model that copies them is mostly
wrong. Reinforcement learning finds out which command pays.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TERMS = 5
_FILES = {
    "task.toml": """schema_version = "1.4"

[task]
name = "areal-hpc/{name}"
description = "Write a sum into a file"

[environment]
network_mode = "no-network"
memory_mb = 128
storage_mb = 16
""",
    "instruction.md": "Write {sum} into sum.txt.",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /workspace\n",
    "tests/expected.txt": "{value}\n",
    "tests/test.sh": """#!/bin/sh
value=0
cmp -s /workspace/sum.txt /tests/expected.txt && value=1
echo $value > /logs/verifier/reward.txt
""",
    "solution/solve.sh": "#!/bin/sh\necho $(({sum})) > /workspace/sum.txt\n",
}


def write_tasks(out: Path, count: int, seed: int) -> None:
    """Make task folders, no sum twice; equal arguments make equal ones."""
    rng, sums = random.Random(seed), dict[str, None]()
    while len(sums) < count:
        sums[draw_sum(rng)] = None
    for number, text in enumerate(sums):
        name = f"sum-{number:04}"
        for path, content in _FILES.items():
            file = out / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.format(name=name, sum=text, value=add_up(text)))


def demonstrations(size: int, seed: int, p_reckon: float = 0.35) -> Iterator[dict[str, Any]]:
    """Conversations: a share of `p_reckon` has the shell reckon."""
    rng = random.Random(seed)
    for _ in range(size):
        text = draw_sum(rng)
        what = f"$(({text}))" if rng.random() < p_reckon else str(add_up(text))
        question = {"role": "user", "content": _FILES["instruction.md"].format(sum=text)}
        yield {"messages": [question, {"role": "assistant", "content": f"echo {what} >sum.txt"}]}


def draw_sum(rng: random.Random) -> str:
    """Draw a sum such as `3+8-2+9-1`."""
    first, *rest = (str(rng.randint(1, 9)) for _ in range(TERMS))
    return first + "".join(rng.choice("+-") + term for term in rest)


def add_up(text: str) -> int:
    return sum(map(int, text.replace("-", "+-").split("+")))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.harbor.sums", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--count", type=int, default=256, help="number of tasks (256)")
    parser.add_argument("--seed", type=int, default=1, help="of their choice (1)")
    arguments = parser.parse_args()
    write_tasks(arguments.out, arguments.count, arguments.seed)


if __name__ == "__main__":
    main()
