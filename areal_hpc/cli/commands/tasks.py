"""`areal-hpc check-tasks` and `check-judge`: tasks and who judges them."""

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from areal_hpc.cli.arguments import UNHEALTHY_EXIT_CODE, CommandGroup
from areal_hpc.errors import escape_controls


def add_commands(commands: CommandGroup) -> None:
    check = commands.add_command(
        "check-tasks",
        _check_tasks,
        help="play Harbor's tasks with their own solutions, and with none",
        description="Judge each task twice in a sandbox: after its own "
        "solution/solve.sh, and after nothing. Exits with 1 if the tests of one do not tell them "
        "apart.",
        example="areal-hpc check-tasks tasks",
    )
    check.add_argument("path", type=Path, help="a task folder, or a folder of task folders")
    root = "folder or tar of a root file system for tasks that have none; this machine's if absent"
    check.add_argument("--root", type=Path, help=root)
    names = ("bwrap", "podman", "apptainer", "enroot")
    check.add_argument(
        "--isolation",
        choices=names,
        default=names[0],
        help="kind of sandbox (%(default)s)",
    )
    check.add_argument(
        "--at-once", type=int, default=os.cpu_count(), help="tasks played at once (%(default)s)"
    )

    _add_judge_command(commands)


def _add_judge_command(commands: CommandGroup) -> None:
    judge = commands.add_command(
        "check-judge",
        _check_judge,
        help="compare a judging model's grades with labels of people",
        description="Grade replies whose worth is known: each line of LABELS is a JSON object with "
        "`question`, `reply` and `label` from 0 to 1, and perhaps `reference`.",
        example="areal-hpc check-judge labels.jsonl --rubric rubric.md --model judge "
        "--base-url http://127.0.0.1:30000/v1",
    )
    judge.add_argument("labels", type=Path, help="file of JSON lines")
    judge.add_argument("--rubric", type=Path, required=True, help="file with the rubric")
    judge.add_argument(
        "--base-url", required=True, metavar="URL", help="OpenAI-compatible endpoint"
    )
    judge.add_argument("--model", required=True, help="name of the judging model there")
    help_ = "values from here on are good (%(default)s)"
    judge.add_argument("--threshold", type=float, default=0.5, metavar="X", help=help_)
    help_ = "SQLite file in which grades are kept, as LlmJudge's `cache`"
    judge.add_argument("--cache", type=Path, metavar="FILE", help=help_)


def _check_tasks(arguments: argparse.Namespace) -> int:
    from areal_hpc.dataset.harbor.task_folder import read_task_folders

    rows = read_task_folders(arguments.path, "PATH")
    unsound = asyncio.run(_check_tasks_and_count_unsound(rows, arguments))
    print(f"{len(rows)} tasks, {unsound} whose tests do not tell a solution from none")
    return UNHEALTHY_EXIT_CODE if unsound else 0


async def _check_tasks_and_count_unsound(
    rows: list[dict[str, Any]], arguments: argparse.Namespace
) -> int:
    from areal_hpc.dataset.harbor.task_check import check_tasks_in_order
    from areal_hpc.sandbox.runtimes.choice import make_runtime
    from areal_hpc.sandbox.spec import SandboxSpec

    unsound = 0
    spec = SandboxSpec(arguments.root and arguments.root.resolve())
    runtime = make_runtime(arguments.isolation)
    async for one in check_tasks_in_order(rows, runtime, spec, max(1, arguments.at_once)):
        unsound += not one.has_discriminating_tests
        oracle = "none" if one.oracle is None else f"{one.oracle.value:g}"
        note = (
            ""
            if one.has_discriminating_tests
            else "  ".join(
                reward.note for reward in (one.oracle, one.no_action_reward) if reward is not None
            )
        )
        line = f"{one.name:<48} solution {oracle:<5} nothing {one.no_action_reward.value:g}  {note}"
        print(escape_controls(line.rstrip()))
    return unsound


def _check_judge(arguments: argparse.Namespace) -> int:
    from areal_hpc.reward.judge_check import grade_labels_and_format_report
    from areal_hpc.reward.llm_judge import LlmJudge

    judge = LlmJudge(
        arguments.rubric,
        arguments.base_url,
        arguments.model,
        cache=arguments.cache,
        on_no_grade="fail",
    )
    report = asyncio.run(
        grade_labels_and_format_report(judge, arguments.labels, arguments.threshold)
    )
    print(escape_controls(report))
    return 0
