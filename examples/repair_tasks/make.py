"""Make repair tasks in Harbor's format: a module with a fault, tests that it fails, and a solution.

python3 -m examples.repair_tasks.make tasks --count 50

They need python3 in the sandbox and nothing else. Demonstrations for a tiny model know two commands
for each: one writes a line of the module anew, and guesses which; one writes the whole module.
"""

import argparse
import itertools
import json
import random
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.repair_tasks.modules import REPAIR_MODULES, RepairModule

MODULE_NAMES = tuple(module.name for module in REPAIR_MODULES)
MAX_CASES_PER_TASK = 8
_JUDGE_SCRIPT = Path(__file__).with_name("judge.py")
_WORK_DIR = "/app"
_DRAWN_CALL_COUNT = 200
"""Calls that are drawn to find one that shows a fault."""

_TASK_FILE_TEMPLATE = """schema_version = "1.4"

[task]
name = "areal-hpc/{name}"
description = "Repair {module}.py"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 120.0

[environment]
network_mode = "no-network"
storage_mb = 64
"""
_INSTRUCTION_TEMPLATE = """The module `{work_dir}/{module}.py` has a fault.
Its function `{module}` {purpose}.
Find the fault and repair the file. Change nothing else: the function keeps its name and arguments.
`python3` is there; no packages and no network are.
"""
_TEST_SCRIPT_TEMPLATE = """#!/bin/sh
exec python3 -I -S /tests/judge.py {work_dir}/{module}
"""
_SOLUTION_SCRIPT_TEMPLATE = """#!/bin/sh
cp /solution/{module}.py {work_dir}/{module}.py
"""
_CONTAINER_FILE_TEMPLATE = """FROM python:3.11-slim
WORKDIR {work_dir}
COPY app/ {work_dir}/
"""


def write_repair_tasks(
    out: Path, count: int, seed: int, modules: Sequence[str] = MODULE_NAMES
) -> list[Path]:
    """Make task folders of the named modules; equal arguments make equal ones."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty: name a new folder")
    rng, made = random.Random(seed), []
    choices = [(module, fault) for module in _find_modules(modules) for fault in module.faults]
    rng.shuffle(choices)
    for number, (module, fault) in zip(range(count), itertools.cycle(choices), strict=False):
        name = f"repair-{number:04}-{module.name.replace('_', '-')}"
        write_task_folder(out / name, name, module, fault, rng)
        made.append(out / name)
    return made


def _find_modules(names: Sequence[str]) -> list[RepairModule]:
    return [module for module in REPAIR_MODULES if module.name in names]


def demonstrations(
    size: int, seed: int, modules: Sequence[str] = MODULE_NAMES, p_rewrite: float = 0.3
) -> Iterator[dict[str, Any]]:
    """Conversations of one command: a share of `p_rewrite` writes the whole module."""
    rng, choices = random.Random(seed), _find_modules(modules)
    for _ in range(size):
        module = rng.choice(choices)
        command = f"cat >{module.name}.py <<E\n{module.source}E"
        if rng.random() >= p_rewrite:
            lines = module.source.splitlines()
            right, _ = rng.choice(module.faults)
            number = module.source[: module.source.index(right)].count("\n")
            script = shlex.quote(f"{number + 1}c\\{lines[number]}")
            command = f"sed -i {script} {module.name}.py"
        instruction = _INSTRUCTION_TEMPLATE.format(
            work_dir=_WORK_DIR, module=module.name, purpose=module.purpose
        )
        question = {"role": "user", "content": instruction}
        yield {"messages": [question, {"role": "assistant", "content": command}]}


def write_task_folder(
    folder: Path, task_name: str, module: RepairModule, fault: tuple[str, str], rng: random.Random
) -> None:
    right, wrong = fault
    assert right in module.source, (module.name, right)
    faulty = module.source.replace(right, wrong, 1)
    words = {
        "name": task_name,
        "module": module.name,
        "purpose": module.purpose,
        "work_dir": _WORK_DIR,
    }
    files = {
        "task.toml": _TASK_FILE_TEMPLATE.format(**words),
        "instruction.md": _INSTRUCTION_TEMPLATE.format(**words),
        "environment/Dockerfile": _CONTAINER_FILE_TEMPLATE.format(**words),
        f"environment/app/{module.name}.py": faulty,
        "tests/test.sh": _TEST_SCRIPT_TEMPLATE.format(**words),
        "tests/judge.py": _JUDGE_SCRIPT.read_text(),
        "tests/cases.json": json.dumps(list(draw_cases(module, faulty, rng))),
        "solution/solve.sh": _SOLUTION_SCRIPT_TEMPLATE.format(**words),
        f"solution/{module.name}.py": module.source,
    }
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if path.endswith(".sh"):
            file.chmod(0o755)


def draw_cases(module: RepairModule, faulty: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Draw calls with their expected results; at least one shows the fault."""
    drawn = [module.draw_arguments(rng) for _ in range(_DRAWN_CALL_COUNT)]
    expected = [call_and_name_error(module.source, module.name, arguments) for arguments in drawn]
    shows = next(
        position
        for position in range(_DRAWN_CALL_COUNT)
        if call_and_name_error(faulty, module.name, drawn[position]) != expected[position]
    )
    for position in dict.fromkeys([shows, *range(MAX_CASES_PER_TASK - 1)]):
        yield {
            "function": module.name,
            "arguments": drawn[position],
            "expected": expected[position],
        }


def call_and_name_error(module_source: str, function: str, arguments: list[Any]) -> Any:
    """Call a sample's function; return its result as JSON keeps it, else its error."""
    names: dict[str, Any] = {}
    exec(module_source, names)  # our own sources, above
    try:
        return json.loads(json.dumps(names[function](*json.loads(json.dumps(arguments)))))
    except Exception as error:  # boundary: a fault may raise anything
        return f"{type(error).__name__}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--count", type=int, default=50, help="number of tasks (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of their choice (%(default)s)")
    parser.add_argument(
        "--modules", nargs="+", choices=MODULE_NAMES, default=MODULE_NAMES, help="default: all"
    )
    arguments = parser.parse_args()
    made = write_repair_tasks(arguments.out, arguments.count, arguments.seed, arguments.modules)
    print(f"made {len(made)} tasks in {arguments.out}")
