"""`areal-hpc doctor`: check a cluster and a recipe before submitting."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import UNHEALTHY_EXIT_CODE, CommandGroup

if TYPE_CHECKING:
    from areal_hpc.recipe.sections.cluster import SlurmConfig


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    doctor = commands.add(
        "doctor",
        _run_checks,
        help="check a cluster, and a recipe, before submitting",
        description="Check from the login node what a run needs: Slurm commands, partitions and "
        "limits, shared storage, the Python of each role, and what the recipe refers to. Exits "
        "with 1 if a check failed.",
        example="areal-hpc doctor\nareal-hpc doctor my_recipe.yaml --site site.yaml --check-node",
    )
    recipe = "recipe whose files and settings are checked as well"
    doctor.add_argument("recipe", type=Path, nargs="?", help=recipe)
    doctor.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as trainer.total_steps=10"
    )
    doctor.add_argument("--site", type=Path, metavar="FILE", help="keys of `cluster`")
    check_node = "submit a one-minute job that checks whether the file root is shared"
    doctor.add_argument("--check-node", action="store_true", help=check_node)


def _run_checks(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.doctor.checks import CheckStatus, format_checks
    from areal_hpc.launch.doctor.registry import run_checks
    from areal_hpc.launch.doctor.subject import DoctorSubject
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.recipe.sections.cluster import SlurmConfig

    recipe, slurm, fileroot = None, SlurmConfig(), None
    if arguments.recipe is not None:
        recipe = load_recipe(arguments.recipe, arguments.overrides, arguments.site)
        slurm, fileroot = recipe.cluster.slurm, recipe.cluster.fileroot
    elif arguments.site is not None:
        slurm, fileroot = _read_site(arguments.site)
    results = run_checks(
        DoctorSubject(
            recipe,
            slurm,
            fileroot,
            has_site=arguments.site is not None,
            asks_node=arguments.check_node,
            say=partial(print, flush=True),
        )
    )
    print("\n".join(format_checks(results)))
    has_failed = any(result.verdict is CheckStatus.FAIL for result in results)
    return UNHEALTHY_EXIT_CODE if has_failed else 0


def _read_site(path: Path) -> tuple[SlurmConfig, Path | None]:
    """What a site file alone says: it need not name a file root."""
    from omegaconf import OmegaConf

    from areal_hpc.recipe.loading import read_site_file
    from areal_hpc.recipe.sections.cluster import ClusterConfig

    tree = OmegaConf.to_container(read_site_file(path), resolve=True)
    cluster = ClusterConfig.model_validate({"fileroot": Path(), **tree})
    return cluster.slurm, cluster.fileroot if "fileroot" in tree else None
