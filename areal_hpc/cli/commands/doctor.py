"""`areal-hpc try` and `doctor`: an agent, a cluster and a recipe before anything costs money."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import (
    SHARED_ARGUMENTS,
    UNHEALTHY_EXIT_CODE,
    CommandGroup,
)
from areal_hpc.errors import RecipeError, RunInterruptedError

if TYPE_CHECKING:
    from areal_hpc.recipe.sections.cluster import SlurmConfig


def add_commands(commands: CommandGroup) -> None:
    _add_trial_commands(commands)
    _add_doctor_commands(commands)


def _add_trial_commands(commands: CommandGroup) -> None:
    trial = commands.add_command(
        "try",
        _run_trial_episodes,
        ["recipe", "overrides"],
        help="let a recipe's agent play some tasks, without a model",
        description="Play the first training tasks with the recipe's agent, through the real "
        "proxy, and print each conversation, its reward and the rows it would become. The model's "
        "replies are random tokens unless --base-url names a server. Nothing is kept. "
        "Exits with 70 if the agent failed.",
        example="areal-hpc try recipes/quickstart.yaml\n"
        "areal-hpc try my_recipe.yaml -n 5 rollout.workflow=my_package.MyAgent",
    )
    add = trial.add_argument
    add("-n", "--tasks", type=int, default=3, metavar="N", help="tasks to play (%(default)s)")
    add("--base-url", metavar="URL", help="a running SGLang generates the replies")


def _run_trial_episodes(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.terminal import say
    from areal_hpc.launch.trial.start import run_trial
    from areal_hpc.recipe.loading import load_recipe

    if arguments.tasks < 1:
        raise RecipeError(f"expected 1 task or more, got {arguments.tasks}", key="--tasks")
    try:
        return run_trial(
            load_recipe(arguments.recipe, arguments.overrides),
            tasks=arguments.tasks,
            print_line=say,
            base_url=arguments.base_url,
        )
    except KeyboardInterrupt:
        return RunInterruptedError.exit_code


def _add_doctor_commands(commands: CommandGroup) -> None:
    doctor = commands.add_command(
        "doctor",
        _run_doctor_checks,
        help="check a cluster, and a recipe, before submitting",
        description="Check from the login node what a run needs: Slurm commands, partitions and "
        "limits, shared storage, the Python of each role, and what the recipe refers to. With "
        "--gpu, on a GPU node, also driver, NCCL and links, and in a few minutes two steps of a "
        "tiny model. Exits with 1 if a check failed.",
        example="areal-hpc doctor\nareal-hpc doctor my_recipe.yaml --site site.yaml --check-node\n"
        "areal-hpc doctor my_recipe.yaml --gpu --json doctor.json",
    )
    recipe = "recipe whose files and settings are checked as well"
    doctor.add_argument("recipe", type=Path, nargs="?", help=recipe)
    for name in ("overrides", "--site"):
        doctor.add_argument(name, **SHARED_ARGUMENTS[name])
    check_node = "submit a one-minute job that checks whether the file root is shared"
    doctor.add_argument("--check-node", action="store_true", help=check_node)
    gpu = "examine the GPUs of this machine"
    doctor.add_argument("--gpu", action="store_true", help=gpu)
    device = "with --gpu: cpu rehearses the same steps on a machine without GPUs"
    doctor.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=device)
    evidence = "write the results there as well, to attach to an issue"
    doctor.add_argument("--json", type=Path, metavar="FILE", help=evidence)


def _run_doctor_checks(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.doctor import gpu
    from areal_hpc.launch.doctor.checks import CheckStatus, DoctorSubject, format_checks
    from areal_hpc.launch.doctor.registry import run_checks, write_evidence
    from areal_hpc.launch.terminal import say
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.recipe.sections.cluster import SlurmConfig

    recipe, slurm, fileroot = None, SlurmConfig(), None
    if arguments.recipe is not None:
        recipe = load_recipe(arguments.recipe, arguments.overrides, arguments.site)
        slurm, fileroot = recipe.cluster.slurm, recipe.cluster.fileroot
    elif arguments.site is not None:
        slurm, fileroot = _read_site(arguments.site)
    if arguments.device == "cpu" and not arguments.gpu:
        raise RecipeError("--device belongs to --gpu", hint="add --gpu")
    results = run_checks(
        DoctorSubject(
            recipe,
            slurm,
            fileroot,
            has_site=arguments.site is not None,
            may_submit_storage_job=arguments.check_node,
            print_line=say,
        ),
        gpu.build_check_plan(recipe, slurm, arguments.device) if arguments.gpu else None,
    )
    print("\n".join(format_checks(results)))
    if arguments.json is not None:
        write_evidence(arguments.json, results)
    has_failed = any(result.verdict is CheckStatus.FAIL for result in results)
    return UNHEALTHY_EXIT_CODE if has_failed else 0


def _read_site(path: Path) -> tuple[SlurmConfig, Path | None]:
    from areal_hpc.recipe.loading import read_site_values
    from areal_hpc.recipe.sections.cluster import ClusterConfig

    values = read_site_values(path)
    cluster = ClusterConfig.model_validate({"fileroot": Path(), **values})
    return cluster.slurm, cluster.fileroot if "fileroot" in values else None
