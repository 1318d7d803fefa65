"""Provenance file of a run: versions, command and git state of each launch; patches beside it."""

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
"""Maximum size of a patch; a longer one is cut."""
MAX_UNTRACKED_FILES = 100
GIT_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class RepositoryState:
    root: str
    revision: str
    untracked: list[str]
    """First `MAX_UNTRACKED_FILES` of the files that git neither tracks nor ignores."""
    patch: bytes
    is_patch_cut: bool


def record_provenance(
    recipe: Recipe, paths: RunPaths, attempt: int, pythons: Mapping[str, str]
) -> None:
    """Add an entry for this launch to the provenance file.

    Only the run's owner may read the files: a patch may hold secrets.
    """
    launches: list[dict[str, Any]] = []
    if paths.provenance.exists():
        launches = json.loads(paths.provenance.read_text())["launches"]
    own, user = read_repository(Path(__file__).parent), read_repository(Path.cwd())
    repositories = {
        "areal_hpc": own,
        "user": None if own and user and own.root == user.root else user,
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
    """Change to the folder of a run's last launch: its agent is imported from there.

    Raises:
        RecipeError: The folder does not exist, or this user may not enter it.
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
    """Read facts of each role's Python; an `error` if it cannot run here, as in an image."""
    descriptions = describe_pythons(python for python in pythons.values() if shutil.which(python))
    environments: dict[str, dict[str, Any]] = {}
    for role, python in pythons.items():
        match descriptions.get(python):
            case None:
                facts: dict[str, Any] = {"error": "there is no such program on this machine"}
            case RolePythonError() as error:
                facts = {"error": str(error)[-500:]}
            case own:
                facts = {"python": own.version, "packages": own.packages, "cuda": own.cuda}
        environments[role] = {"interpreter": python, **facts}
    return environments


def _read_gpu_driver_version() -> str | None:
    try:
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", DRIVER_FILE.read_text())
    except OSError:
        return None
    return match[1] if match else None


def read_repository(folder: Path) -> RepositoryState | None:
    """Read the state of a folder's repository; None without a repository or without git."""
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
    """Return at most `MAX_PATCH_BYTES + 1` bytes of output; git writes nothing."""
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
