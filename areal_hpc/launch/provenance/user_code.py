"""Copy of the user's code as launched: the packages that a recipe names, in one zip file."""

import hashlib
import io
import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from areal_hpc.recipe.recipe import Recipe

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
class UserCodeArchive:
    packages: list[str]
    files: int
    left_out: int
    """Files of these packages that are too many, too large, links, or of another kind."""
    digest: str
    """`sha256:...` of names and contents of the files."""
    archive: bytes


def read_user_code(recipe: Recipe, folders: Sequence[str]) -> UserCodeArchive | None:
    """The packages that a recipe's names lie in; None if they are all ours.

    They are looked for in `folders` first, where the run's processes find them; nothing is
    imported.
    """
    packages = sorted(
        {name.split(".")[0] for name in list_user_code_dotted_names(recipe)} - {OWN_PACKAGE}
    )
    found = [(package, root) for package in packages if (root := _find_package(package, folders))]
    if not found:
        return None
    contents, left_out = dict[str, bytes](), 0
    for _, root in found:
        for file in _iterate_visible_files(root):
            content = _read_code_file(file)
            total = sum(map(len, contents.values()))
            if (
                content is None
                or len(contents) == MAX_FILES
                or total + len(content) > MAX_COPY_BYTES
            ):
                left_out += 1
            else:
                contents[str(file.relative_to(root.parent))] = content
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(f"{name}\0{hashlib.sha256(contents[name]).hexdigest()}\n".encode())
    return UserCodeArchive(
        [package for package, _ in found],
        len(contents),
        left_out,
        f"sha256:{digest.hexdigest()}",
        _pack_zip(contents),
    )


def list_user_code_dotted_names(recipe: Recipe) -> Iterator[str]:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    names = [rollout.workflow, evaluation.workflow, rollout.should_accept, rollout.curriculum]
    names += [rollout.agent.auxiliary] if ":" in rollout.agent.auxiliary else []
    names.append(recipe.trainer.objective.custom)
    names += [one.workflow for one in recipe.evaluation_sets]
    names += [tasks.generator or "" for tasks, _ in recipe.task_sets_with_keys]
    for name in names:
        if name:
            yield name.partition(":")[0]


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
        for file in sorted(files):
            if not file.startswith("."):
                yield Path(folder, file)


def _read_code_file(file: Path) -> bytes | None:
    if file.suffix not in CODE_SUFFIXES or file.is_symlink():
        return None
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    return content if len(content) <= MAX_FILE_BYTES else None


def _pack_zip(contents: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name), contents[name], zipfile.ZIP_DEFLATED)
    return stream.getvalue()
