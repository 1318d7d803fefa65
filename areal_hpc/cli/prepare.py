"""Commands before a run: recipes, projects, downloads, harnesses, migration, and checks."""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from areal_hpc.checkout import find_checkout, format_install_command
from areal_hpc.cli.arguments import (
    OVERRIDES,
    RECIPE,
    UNHEALTHY_EXIT_CODE,
    CommandTable,
    argument,
    parse_positive_int,
)
from areal_hpc.errors import Problem, RecipeError, escape_controls

commands = CommandTable()


@commands.add("recipes")
def _print_recipes(arguments: argparse.Namespace) -> int:
    """List the recipes that ship with the package.

    A command that takes a recipe also takes such a name, as does `extends` at the top of a
    recipe.

    $ areal-hpc recipes
    """
    from areal_hpc.recipe.files import list_shipped_recipes, parse_header
    from areal_hpc.view.formatting import format_table

    rows = [("name", "hardware", "wall time", "purpose")]
    for name, path in list_shipped_recipes().items():
        header = parse_header(path.read_text())
        rows.append((name, header.hardware, header.wall_time, header.purpose))
    print("\n".join(format_table(rows)))
    return 0


@commands.add(
    "init",
    argument("folder", "folder to write into", type=Path, metavar="DIR"),
    argument(
        "--like",
        "a shipped recipe (areal-hpc recipes); the tutorial's without this",
        metavar="NAME",
    ),
)
def _write_project(arguments: argparse.Namespace) -> int:
    """Begin a project: a recipe and its agent.

    They are those of the tutorial, or of a shipped recipe, and run as they are. No file is
    overwritten.

    $ areal-hpc init my_project
    $ areal-hpc init my_project --like quickstart
    """
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.recipe.project_files import read_project_files

    project = read_project_files(arguments.like)
    targets = {arguments.folder / name: content for name, content in project.contents.items()}
    if existing := [path for path in targets if path.exists()]:
        raise RecipeError.from_problems(
            Problem(f"there is a file {path} already", "DIR", "name another folder")
            for path in existing
        )
    for path, content in targets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        print(f"wrote    {path}")
    has_hub_model = load_recipe(arguments.folder / project.recipe).model.hub is not None
    _print_next_commands(arguments.folder, project.recipe, has_hub_model)
    return 0


def _print_next_commands(folder: Path, recipe: str, has_hub_model: bool) -> None:
    print(f"next     cd {shlex.quote(str(folder))}")
    if find_checkout() is None:
        print(f"         {format_install_command('main')}")
        print(f"         {format_install_command('serve')}  # in an environment of its own:")
        print("         # add cluster.serve.python=PATH/bin/python to what follows")
    for command in (*(["prefetch"] if has_hub_model else []), "plan", "try", "run"):
        print(f"         areal-hpc {command} {recipe}")


@commands.add("prefetch", RECIPE, OVERRIDES)
def _prefetch_recipe(arguments: argparse.Namespace) -> int:
    """Download the models, data sets and harnesses of a recipe.

    For a login node: runs never download. Revisions and digests are written into the run
    directory. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are honored.

    $ areal-hpc prefetch recipes/gpu64_math_qwen2.5_7b.yaml
    """
    from areal_hpc.agents.harness.programs import install_harness, list_recipe_harnesses
    from areal_hpc.launch.prefetch import prefetch_files
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.view.formatting import say

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    for name, folder in list_recipe_harnesses(recipe):
        _print_install_result(name, folder, install_harness(name, folder))
    prefetch_files(recipe, say)
    print("everything is in the cache")
    return 0


@commands.add(
    "install-harness",
    argument("names", "a harness, or all", nargs="+", metavar="NAME"),
    argument("--dir", "their folder (.venvs/harnesses of the checkout)", type=Path, metavar="DIR"),
    argument(
        "--version",
        "another version than the lock's, or `newest`; untested, and its packages unpinned",
        default="",
    ),
)
def _install_harnesses(arguments: argparse.Namespace) -> int:
    """Install coding harnesses for HarnessAgent.

    From npm or PyPI (claude-code, codex, opencode and others; docs/harnesses.md), each in a
    folder of its own, with the exact packages of its lock. A harness that is there already
    stays as it is.

    $ areal-hpc install-harness opencode
    """
    from areal_hpc.agents.harness.programs import (
        HARNESSES,
        HARNESSES_DIR,
        install_harness,
        query_newest_version,
    )

    folder = (arguments.dir or HARNESSES_DIR).absolute()
    for name in HARNESSES if arguments.names == ["all"] else arguments.names:
        version = arguments.version
        if version == "newest":
            version = query_newest_version(name)
        _print_install_result(name, folder, install_harness(name, folder, version))
    return 0


def _print_install_result(harness_name: str, folder: Path, is_new: bool) -> None:
    verb = "is installed in" if is_new else "was there already:"
    print(f"{harness_name} {verb} {folder / harness_name}")


@commands.add(
    "migrate",
    argument("config", "the file that AReaL's --config names", type=Path),
    OVERRIDES,
    argument(
        "--rows", "number of training rows, to convert epochs to steps", type=parse_positive_int
    ),
    argument("--out", "write the recipe there instead of printing it", type=Path),
)
def _translate_areal_config(arguments: argparse.Namespace) -> int:
    """Translate an AReaL configuration into a recipe.

    Keys without a counterpart are listed with the reason, and what the recipe still needs.

    $ areal-hpc migrate gsm8k_grpo.yaml --rows 7473 --out my_recipe.yaml
    """
    import yaml

    from areal_hpc.areal.api.cli_args import read_areal_config_file
    from areal_hpc.areal.translation import translate_to_recipe
    from areal_hpc.recipe.loading import build_recipe

    translation = translate_to_recipe(
        read_areal_config_file(arguments.config, arguments.overrides), arguments.rows
    )
    text = yaml.safe_dump(translation.recipe, sort_keys=False)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(f"# From {arguments.config}, by areal-hpc migrate.\n{text}")
        print(f"wrote {arguments.out}")
    if translation.untranslated:
        print("# No counterpart:")
        for entry in translation.untranslated:
            print(f"#   {entry.key}: {entry.value}\n#     {entry.reason}")
    problems = []
    rollout = translation.recipe.get("rollout", {})
    # AReaL's scripts name their agent in Python.
    if not rollout.get("workflow") and rollout.get("agent", {}).get("mode") != "online":
        hint = "add rollout.workflow=package.module.Agent to the recipe"
        problems.append(Problem("this key is required", "rollout.workflow", hint))
    try:
        build_recipe(translation.recipe)
    except RecipeError as error:
        known = {problem.key for problem in problems}
        problems += [problem for problem in error.problems if problem.key not in known]
    if problems:
        print("# Before it can run:")
    for problem in problems:
        print(f"#   {problem.key}: {problem.message}\n#     try: {problem.hint}")
    return 0


@commands.add(
    "check-tasks",
    argument("path", "a task folder, or a folder of task folders", type=Path),
    argument(
        "--root",
        "folder or tar of a root file system for tasks that have none; this machine's if absent",
        type=Path,
    ),
    argument("--isolation", "bwrap, podman, apptainer or enroot (%(default)s)", default="bwrap"),
    argument("--at-once", "tasks played at once (%(default)s)", type=int, default=os.cpu_count()),
)
def _check_tasks(arguments: argparse.Namespace) -> int:
    """Play Harbor's tasks with their own solutions, and with none.

    Each task is judged in a sandbox after its own solution/solve.sh, and after nothing. Exits
    with 1 if the tests of one do not tell them apart.

    $ areal-hpc check-tasks tasks
    """
    import asyncio

    from areal_hpc.dataset.harbor.task_folder import read_task_folders
    from areal_hpc.recipe.sections.sandbox import SANDBOX_RUNTIMES

    if arguments.isolation not in SANDBOX_RUNTIMES:
        names = ", ".join(SANDBOX_RUNTIMES)
        raise RecipeError(
            f"expected one of {names}",
            key=f"--isolation {arguments.isolation}",
            hint="areal-hpc doctor names those that are installed",
        )
    rows = read_task_folders(arguments.path, "PATH")
    unsound = asyncio.run(_count_unsound_tasks(rows, arguments))
    print(f"{len(rows)} tasks, {unsound} whose tests do not tell a solution from none")
    return UNHEALTHY_EXIT_CODE if unsound else 0


async def _count_unsound_tasks(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    from areal_hpc.reward.harbor import check_tasks_in_order
    from areal_hpc.sandbox.runtimes import make_runtime
    from areal_hpc.sandbox.sandbox import SandboxSpec

    unsound = 0
    spec = SandboxSpec(arguments.root and arguments.root.resolve())
    runtime = make_runtime(arguments.isolation)
    async for task in check_tasks_in_order(rows, runtime, spec, max(1, arguments.at_once)):
        unsound += not task.has_discriminating_tests
        oracle = "none" if task.oracle is None else f"{task.oracle.value:g}"
        no_action = task.no_action_reward
        notes = [reward.note for reward in (task.oracle, no_action) if reward is not None]
        note = "" if task.has_discriminating_tests else "  ".join(notes)
        line = f"{task.name:<48} solution {oracle:<5} nothing {no_action.value:g}  {note}"
        print(escape_controls(line.rstrip()))
    return unsound


@commands.add(
    "check-judge",
    argument("labels", "file of JSON lines", type=Path),
    argument("--rubric", "file with the rubric", type=Path, required=True),
    argument("--base-url", "OpenAI-compatible endpoint", required=True, metavar="URL"),
    argument("--model", "name of the judging model there", required=True),
    argument(
        "--threshold",
        "values from here on are good (%(default)s)",
        type=float,
        default=0.5,
        metavar="X",
    ),
    argument("--cache", "SQLite file in which grades are kept, as LlmJudge's `cache`", type=Path),
)
def _check_judge(arguments: argparse.Namespace) -> int:
    """Compare a judging model's grades with labels of people.

    Each line of LABELS is a JSON object with `question`, `reply` and `label` from 0 to 1, and
    perhaps `reference`.

    $ areal-hpc check-judge labels.jsonl --rubric rubric.md --model judge --base-url http://127.0.0.1:30000/v1
    """
    import asyncio

    from areal_hpc.reward.judge_check import report_agreement
    from areal_hpc.reward.llm_judge import LlmJudge

    judge = LlmJudge(
        arguments.rubric,
        arguments.base_url,
        arguments.model,
        cache=arguments.cache,
        on_no_grade="fail",
    )
    report = asyncio.run(report_agreement(judge, arguments.labels, arguments.threshold))
    print(escape_controls(report))
    return 0
