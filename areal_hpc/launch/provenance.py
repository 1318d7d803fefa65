"""Provenance file of a run: one entry for each launch, and patches beside it."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.launch.checks.role_python import RolePythonError, describe_pythons
from areal_hpc.recipe.keys import hide_private_arguments
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.files import write_atomic_private
from areal_hpc.rundir.paths import RunPaths

DRIVER_FILE = Path("/proc/driver/nvidia/version")
MAX_PATCH_BYTES = 1 << 20
"""A longer patch is cut."""
MAX_UNTRACKED_FILES = 100
GIT_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class RepositoryState:
    root: str
    revision: str
    untracked: list[str]
    """Files that git neither tracks nor ignores, the first of them."""
    patch: bytes
    is_patch_cut: bool


def record_provenance(
    recipe: Recipe, paths: RunPaths, attempt: int, pythons: Mapping[str, str]
) -> None:
    """Add this launch to the provenance file: what runs, and from where.

    All files are for the run's owner alone: a patch may hold secrets.
    """
    launches: list[dict[str, Any]] = []
    if paths.provenance.exists():
        launches = json.loads(paths.provenance.read_text())["launches"]
    own, here = read_repository(Path(__file__).parent), read_repository(Path.cwd())
    repositories = {
        "areal_hpc": own,
        "user": None if own and here and own.root == here.root else here,
    }
    launches.append(
        {
            "attempt": attempt,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": list(hide_private_arguments(sys.argv)),
            "folder": str(Path.cwd()),
            "areal_hpc": importlib.metadata.version("areal-hpc"),
            "git_commit": own and own.revision,
            "python": platform.python_version(),
            "host": platform.node(),
            "environments": _read_environments(pythons),
            "gpu_driver": _read_gpu_driver_version(),
            "isolation": {
                "agent": recipe.rollout.agent.isolation,
                "reward": recipe.reward.isolation,
            },
            "repositories": {
                name: _record_repository(
                    state, paths.provenance_copy(attempt, f"{name}.patch"), paths
                )
                for name, state in repositories.items()
                if state is not None
            },
        }
    )
    write_atomic_private(paths.provenance, json.dumps({"launches": launches}, indent=2).encode())


def enter_launch_folder(paths: RunPaths) -> None:
    """Go to the folder in which a run was last launched: its agent and its files begin there.

    Raises:
        RecipeError: It is not there, or not for this user.
    """
    if not paths.provenance.exists():
        return
    folder = json.loads(paths.provenance.read_text())["launches"][-1].get("folder", ".")
    try:
        os.chdir(folder)
    except OSError as error:
        raise RecipeError(
            f"the run was launched in {folder}, where its agent is imported from: {error.strerror}",
            key=str(paths.root),
            hint="make that folder available again",
        ) from error


def _read_environments(pythons: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By role; one that cannot be asked here, as in a container's image, has an `error`."""
    answers = describe_pythons(python for python in pythons.values() if shutil.which(python))
    found: dict[str, dict[str, Any]] = {}
    for role, python in pythons.items():
        match answers.get(python):
            case None:
                facts: dict[str, Any] = {"error": "there is no such program on this machine"}
            case RolePythonError() as error:
                facts = {"error": str(error)[-500:]}
            case known:
                facts = {"python": known.version, "packages": known.packages, "cuda": known.cuda}
        found[role] = {"interpreter": python, **facts}
    return found


def _read_gpu_driver_version() -> str | None:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", DRIVER_FILE.read_text())
    except OSError:
        return None
    return found[1] if found else None


def read_repository(folder: Path) -> RepositoryState | None:
    """The repository that a folder lies in; None where there is none, or no git."""
    try:
        root = Path(_run_git(folder, "rev-parse", "--show-toplevel").decode().strip())
        revision = _run_git(folder, "rev-parse", "HEAD").decode().strip()
        untracked = _run_git(root, "ls-files", "--others", "--exclude-standard")
        patch = _run_git(root, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    return RepositoryState(
        str(root),
        revision,
        untracked.decode(errors="replace").splitlines()[:MAX_UNTRACKED_FILES],
        patch[:MAX_PATCH_BYTES],
        len(patch) > MAX_PATCH_BYTES,
    )


def _run_git(folder: Path, *words: str) -> bytes:
    """The output up to one byte more than a patch may have; the repository is not written to."""
    with tempfile.TemporaryFile() as output:
        subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-c", "diff.external=", *words],
            cwd=folder,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            stdout=output,
            stderr=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
        output.seek(0)
        return output.read(MAX_PATCH_BYTES + 1)


def _record_repository(state: RepositoryState, patch: Path, paths: RunPaths) -> dict[str, Any]:
    entry = dataclasses.asdict(state)
    del entry["patch"]
    if state.patch:
        write_atomic_private(patch, state.patch)
    return {**entry, "patch": str(patch.relative_to(paths.root)) if state.patch else None}
