"""Checks of what a recipe refers to: files, models, interpreters, user code."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from areal_hpc.checkout import format_python_hint
from areal_hpc.dataset.sources import list_source_paths
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.checks.model_files import find_model_problems
from areal_hpc.launch.checks.sglang_options import (
    find_extra_args_problems,
    find_parser_name_problems,
)
from areal_hpc.launch.checks.user_code import find_user_code_problems
from areal_hpc.launch.role_python import find_role_python_problems
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import ENVIRONMENTS

MIN_RUN_DIR_FREE_BYTES = 256 * 1024 * 1024


def find_input_problems(
    recipe: Recipe, pythons: Mapping[str, str], sys_path: tuple[str, ...]
) -> list[Problem]:
    """All problems of the files, interpreters and names that a recipe mentions. Leaves nothing."""
    there = {role: python for role, python in pythons.items() if shutil.which(python)}
    problems = [
        Problem(
            f"no Python interpreter for role {role} at {python}",
            f"cluster.{role}.python",
            f"{format_python_hint(python, ENVIRONMENTS[role])}, or set this key to the interpreter "
            "of the role",
        )
        for role, python in pythons.items()
        if role not in there
    ]
    problems += [
        *find_role_python_problems(recipe, there),
        *_find_run_directory_problems(recipe.run_dir),
        *find_model_problems(recipe),
    ]
    if "serve" in there:
        problems += find_parser_name_problems(recipe.inference, there["serve"])
        problems += find_extra_args_problems(recipe, there["serve"])
    for part, key in recipe.task_sets_with_keys:
        try:
            list_source_paths(part, key)
        except RecipeError as error:
            problems += error.problems
    return [*problems, *find_user_code_problems(recipe, pythons, sys_path)]


def _find_run_directory_problems(run_dir: Path) -> Iterator[Problem]:
    made = find_missing_folders(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
        free_bytes = shutil.disk_usage(run_dir).free
    except OSError as error:
        yield Problem(
            f"the run directory cannot be written: {error.strerror}: {run_dir}",
            "cluster.fileroot",
            "choose shared storage that you may write to, with cluster.fileroot=/path",
        )
        return
    finally:
        remove_folders_up_to_first_nonempty(made)
    if free_bytes < MIN_RUN_DIR_FREE_BYTES:
        yield Problem(
            f"the run directory's file system is full: {free_bytes // 2**20} MiB free, "
            f"at least {MIN_RUN_DIR_FREE_BYTES // 2**20} MiB needed: {run_dir}",
            "cluster.fileroot",
            "free some space, or choose another place with cluster.fileroot=/path",
        )


def find_missing_folders(path: Path) -> list[Path]:
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_folders_up_to_first_nonempty(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
