"""`areal-hpc doctor`: check a cluster and a recipe before submitting."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import UNHEALTHY_EXIT_CODE, CommandGroup

if TYPE_CHECKING:
    from areal_hpc.launch.doctor.checks import CheckResult
    from areal_hpc.recipe.recipe import Recipe
    from areal_hpc.recipe.sections.cluster import SlurmConfig


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    doctor = commands.add(
        "doctor",
        _run_checks,
        help="check a cluster, and a recipe, before submitting",
        description="Check from the login node what a run needs: Slurm commands and partitions, "
        "shared storage, the Python of each role, and what the recipe refers to. Exits with 1 if "
        "a check failed.",
    )
    recipe = "recipe whose files and settings are checked as well"
    doctor.add_argument("recipe", type=Path, nargs="?", help=recipe)
    doctor.add_argument("overrides", nargs="*", metavar="key=value")
    doctor.add_argument("--site", type=Path, metavar="FILE", help="keys of `cluster`")
    check_node = "submit a one-minute job that checks whether the file root is shared"
    doctor.add_argument("--check-node", action="store_true", help=check_node)


def _run_checks(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.doctor.checks import CheckStatus, format_checks
    from areal_hpc.launch.doctor.slurm_checks import check_slurm
    from areal_hpc.launch.doctor.storage_checks import check_storage, check_storage_from_node
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.recipe.sections.cluster import SlurmConfig

    checks: list[CheckResult] = []
    recipe, slurm, fileroot = None, SlurmConfig(), None
    if arguments.recipe is not None:
        recipe = load_recipe(arguments.recipe, arguments.overrides, arguments.site)
        slurm, fileroot = recipe.cluster.slurm, recipe.cluster.fileroot
    elif arguments.site is not None:
        slurm, fileroot = _read_site(arguments.site)
    checks += check_slurm(slurm, _render_scripts(recipe) if recipe else {})
    if fileroot is not None:
        fileroot = fileroot.expanduser().resolve()
        stored = list(check_storage(fileroot))
        can_submit = all(check.verdict is not CheckStatus.FAIL for check in [*checks, *stored])
        if arguments.check_node and can_submit:
            answer = check_storage_from_node(
                fileroot, slurm.get_options("trainer"), partial(print, flush=True)
            )
            stored = [check for check in stored if check.name != "shared"] + [answer]
        checks += stored
    if recipe is not None:
        checks += _check_recipe(recipe)
    print("\n".join(format_checks(checks)))
    has_failed = any(check.verdict is CheckStatus.FAIL for check in checks)
    return UNHEALTHY_EXIT_CODE if has_failed else 0


def _read_site(path: Path) -> tuple[SlurmConfig, Path | None]:
    """What a site file alone says: it need not name a file root."""
    from omegaconf import OmegaConf

    from areal_hpc.recipe.loading import read_site_file
    from areal_hpc.recipe.sections.cluster import ClusterConfig

    tree = OmegaConf.to_container(read_site_file(path), resolve=True)
    cluster = ClusterConfig.model_validate({"fileroot": Path(), **tree})
    return cluster.slurm, cluster.fileroot if "fileroot" in tree else None


def _render_scripts(recipe: Recipe) -> dict[str, str]:
    from areal_hpc.launch.slurm_launcher import build_requests
    from areal_hpc.rundir.rendezvous import EVALUATION_CELL, format_cell_name
    from areal_hpc.slurm.submit import render_script

    scripts = {}
    for request in build_requests(recipe, Path.cwd()):
        # Of jobs that wait for others Slurm has no numbers yet; cells are alike.
        if request.job in ("sft", "trainer", format_cell_name(0), EVALUATION_CELL):
            lines = render_script(request).splitlines(keepends=True)
            scripts[request.job] = "".join(line for line in lines if "--dependency=" not in line)
    return scripts


def _check_recipe(recipe: Recipe) -> list[CheckResult]:
    """Interpreters, model, data sets and the agent."""
    from areal_hpc.jobs.environment import get_interpreters
    from areal_hpc.launch.doctor.checks import fail, ok
    from areal_hpc.launch.doctor.python_checks import check_interpreters
    from areal_hpc.launch.input_checks import check_inputs

    pythons = get_interpreters(recipe)
    is_contained = recipe.cluster.slurm.container.kind != "none"
    checks = [] if is_contained else list(check_interpreters(pythons))
    # Interpreters have checks of their own, and those within containers are not to be seen here.
    problems = [
        problem
        for problem in check_inputs(recipe, pythons, (str(Path.cwd()),))
        if not problem.key.endswith(".python")
    ]
    checks += [fail(problem.key or "recipe", problem.message, problem.hint) for problem in problems]
    return checks if problems else [*checks, ok("recipe", "model, data and agent found")]
