"""Provenance file of a run: one entry for each launch, and patches and code beside it."""

import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.launch.role_python import RolePythonError, describe_pythons
from areal_hpc.recipe.private_values import hide_private_arguments
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.atomic import write_atomic_private
from areal_hpc.rundir.paths import RunPaths

DRIVER_FILE = Path("/proc/driver/nvidia/version")
MAX_PATCH_BYTES = 1 << 20
"""A longer patch is cut: the copy of the user's code has the rest."""
MAX_UNTRACKED_FILES = 100
GIT_TIMEOUT_S = 20.0
CODE_SUFFIXES = frozenset(
    {".cfg", ".ini", ".j2", ".jinja", ".json", ".md", ".py", ".pyi", ".sh", ".toml", ".txt",
     ".yaml", ".yml"}
)  # fmt: skip
"""Files that are copied: programs, and the prompts and settings beside them."""
MAX_FILE_BYTES = 256 << 10
MAX_COPY_BYTES = 8 << 20
MAX_FILES = 2000
OWN_PACKAGE = "areal_hpc"
"""Its version and commit are recorded: it needs no copy."""


@dataclass(frozen=True, slots=True)
class RepositoryState:
    root: str
    revision: str
    untracked: list[str]
    """Files that git neither tracks nor ignores, the first of them."""
    patch: bytes
    is_patch_cut: bool


def record_provenance(
    recipe: Recipe,
    paths: RunPaths,
    attempt: int,
    pythons: Mapping[str, str],
    folders: Sequence[str],
) -> None:
    """Add this launch to the provenance file: what runs, and from where.

    `folders` are those that the run's processes import the user's code from. All files are for the
    run's owner alone: a patch may hold secrets.
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
            "user_code": _record_user_code(recipe, paths, attempt, folders, launches),
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


def _record_user_code(
    recipe: Recipe,
    paths: RunPaths,
    attempt: int,
    folders: Sequence[str],
    earlier_launches: Sequence[Mapping[str, Any]],
) -> dict[str, Any] | None:
    """Copy the packages of the user's that a recipe names; None if it names none.

    They are looked for in `folders` first, as the run's processes do; nothing is imported. Files
    that are too many, too large, links, or of another kind are left out.
    """
    names = {re.split("[.:]", name)[0] for name in _list_user_code_names(recipe)} - {OWN_PACKAGE}
    roots = {name: root for name in sorted(names) if (root := _find_package(name, folders))}
    if not roots:
        return None
    contents, left_out, total = dict[str, bytes](), 0, 0
    for root in roots.values():
        for file in _iterate_visible_files(root):
            content = _read_code_file(file)
            if (
                content is None
                or len(contents) == MAX_FILES
                or total + len(content) > MAX_COPY_BYTES
            ):
                left_out += 1
            else:
                contents[str(file.relative_to(root.parent))] = content
                total += len(content)
    hashed, stream = hashlib.sha256(), io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(contents.items()):
            hashed.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    digest = f"sha256:{hashed.hexdigest()}"
    known = [launch.get("user_code") or {} for launch in earlier_launches]
    copy = next((one["copy"] for one in known if one.get("digest") == digest), None)
    if copy is None:
        zip_file = paths.provenance_copy(attempt, "user_code.zip")
        write_atomic_private(zip_file, stream.getvalue())
        copy = str(zip_file.relative_to(paths.root))
    return {
        "packages": [*roots],
        "files": len(contents),
        "left_out": left_out,
        "digest": digest,
        "copy": copy,
    }


def _list_user_code_names(recipe: Recipe) -> Iterator[str]:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    names = [rollout.workflow, evaluation.workflow, rollout.should_accept, rollout.curriculum]
    names += [rollout.agent.auxiliary] if ":" in rollout.agent.auxiliary else []
    names.append(recipe.trainer.objective.custom)
    names += [one.workflow for one in recipe.evaluation_sets]
    names += [tasks.generator or "" for tasks, _ in recipe.task_sets_with_keys]
    yield from filter(None, names)


def _find_package(package: str, folders: Sequence[str]) -> Path | None:
    spec = PathFinder.find_spec(package, [*folders, *sys.path])
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def _iterate_visible_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith((".", "__pycache__")))
        yield from (Path(folder, file) for file in sorted(files) if not file.startswith("."))


def _read_code_file(file: Path) -> bytes | None:
    if file.suffix not in CODE_SUFFIXES or file.is_symlink():
        return None
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    return content if len(content) <= MAX_FILE_BYTES else None
