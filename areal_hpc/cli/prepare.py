"""What runs need: recipes, a project, models, harnesses, tasks, and recipes made of others'."""

import argparse
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_hpc.checkout import find_checkout, format_install_command
from areal_hpc.cli.arguments import UNHEALTHY_EXIT_CODE, CommandGroup, parse_positive_int
from areal_hpc.errors import Problem, RecipeError, escape_controls


def add_commands(commands: CommandGroup) -> None:
    _add_start_commands(commands)
    _add_prepare_commands(commands)
    _add_tasks_commands(commands)


def _add_start_commands(commands: CommandGroup) -> None:
    commands.add_command(
        "recipes",
        _print_recipes,
        help="list the recipes that ship with the package",
        description="List the shipped recipes: name, hardware, wall time and purpose. A command "
        "that takes a recipe also takes such a name, as does `extends` at the top of a recipe.",
        example="areal-hpc recipes",
    )
    init = commands.add_command(
        "init",
        _write_project,
        help="begin a project: a recipe and its agent",
        description="Write a recipe and the code that it names into a folder: those of the "
        "tutorial, or of a shipped recipe. Both run as they are. No file is overwritten.",
        example="areal-hpc init my_project\nareal-hpc init my_project --like quickstart",
    )
    init.add_argument("folder", type=Path, metavar="DIR", help="folder to write into")
    like = "a shipped recipe (areal-hpc recipes); the tutorial's without this"
    init.add_argument("--like", metavar="NAME", help=like)


def _print_recipes(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe.shipped import list_shipped_recipes, parse_header
    from areal_hpc.view.formatting import format_table

    rows = [("name", "hardware", "wall time", "purpose")]
    for name, path in list_shipped_recipes().items():
        header = parse_header(path.read_text())
        rows.append((name, header.hardware, header.wall_time, header.purpose))
    print("\n".join(format_table(rows)))
    return 0


def _write_project(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.recipe.project_files import read_project_files

    project = read_project_files(arguments.like)
    targets = {arguments.folder / name: content for name, content in project.contents.items()}
    if there := [path for path in targets if path.exists()]:
        raise RecipeError.from_problems(
            Problem(f"there is a file {path} already", "DIR", "name another folder")
            for path in there
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


def _add_prepare_commands(commands: CommandGroup) -> None:
    commands.add_command(
        "prefetch",
        _prefetch_recipe,
        ["recipe", "overrides"],
        help="download the models, data sets and harnesses of a recipe",
        description="Put the models and data sets of a recipe into the Hugging Face cache, write "
        "their revisions and digests into the run directory, and install the coding harnesses "
        "that its agents run. For a login node: runs never "
        "download. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are honored.",
        example="areal-hpc prefetch recipes/gpu64_math_qwen2.5_7b.yaml",
    )
    harness = commands.add_command(
        "install-harness",
        _install_harnesses,
        help="install coding harnesses for HarnessAgent",
        description="Install coding harnesses (claude-code, codex, opencode and others; "
        "docs/harnesses.md) from npm or PyPI, each in a folder of its own, with the exact "
        "packages of its lock. One that is there already is left as it is.",
        example="areal-hpc install-harness opencode",
    )
    harness.add_argument("names", nargs="+", metavar="NAME", help="a harness, or all")
    harness.add_argument("--dir", type=Path, help="their folder (.venvs/harnesses of the checkout)")
    version = "another version than the lock's, or `newest`; untested, and its packages unpinned"
    harness.add_argument("--version", default="", help=version)
    migrate = commands.add_command(
        "migrate",
        _translate_areal_config,
        help="translate an AReaL configuration into a recipe",
        description="Print the recipe for an AReaL configuration, every key without a "
        "counterpart and why, and what the recipe still needs.",
        example="areal-hpc migrate gsm8k_grpo.yaml --rows 7473 --out my_recipe.yaml",
    )
    migrate.add_argument("config", type=Path, help="the file that AReaL's --config names")
    help_ = "as AReaL takes them"
    migrate.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help_)
    rows = "number of training rows, to convert epochs to steps"
    migrate.add_argument("--rows", type=parse_positive_int, help=rows)
    migrate.add_argument("--out", type=Path, help="write the recipe there instead of printing it")


def _prefetch_recipe(arguments: argparse.Namespace) -> int:
    from areal_hpc.agents.harness.installation import (
        install_harness,
        list_recipe_harnesses,
    )
    from areal_hpc.launch.prefetch import prefetch_files
    from areal_hpc.launch.terminal import say
    from areal_hpc.recipe.loading import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    for name, folder in list_recipe_harnesses(recipe):
        _print_install_result(name, folder, install_harness(name, folder))
    prefetch_files(recipe, say)
    print("everything is in the cache")
    return 0


def _install_harnesses(arguments: argparse.Namespace) -> int:
    from areal_hpc.agents.harness.installation import (
        HARNESSES_DIR,
        install_harness,
        query_newest_version,
    )
    from areal_hpc.agents.harness.programs import HARNESSES

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


def _translate_areal_config(arguments: argparse.Namespace) -> int:
    import yaml

    from areal_hpc.areal.config.translation import translate_to_recipe
    from areal_hpc.areal.loading import read_areal_config_file
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
        for one in translation.untranslated:
            print(f"#   {one.key}: {one.value}\n#     {one.reason}")
    problems = list(_find_missing_agent(translation.recipe))
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


def _find_missing_agent(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    """AReaL's scripts name their agent in Python."""
    rollout = recipe.get("rollout", {})
    if not rollout.get("workflow") and rollout.get("agent", {}).get("mode") != "online":
        hint = "add rollout.workflow=package.module.Agent to the recipe"
        yield Problem("this key is required", "rollout.workflow", hint)


def _add_tasks_commands(commands: CommandGroup) -> None:
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
    import asyncio

    from areal_hpc.dataset.harbor.task_folder import read_task_folders

    rows = read_task_folders(arguments.path, "PATH")
    unsound = asyncio.run(_count_unsound_tasks(rows, arguments))
    print(f"{len(rows)} tasks, {unsound} whose tests do not tell a solution from none")
    return UNHEALTHY_EXIT_CODE if unsound else 0


async def _count_unsound_tasks(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    from areal_hpc.dataset.harbor.task_check import check_tasks_in_order
    from areal_hpc.sandbox.runtimes import make_runtime
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
