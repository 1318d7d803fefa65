"""Images of Harbor's task folders, built by podman on a machine with a network.

`podman build` needs neither a daemon nor root. An image is saved as an archive in the task's
folder, so that shared storage holds one file for a task, and nodes need no registry.
"""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from areal_hpc.dataset.harbor.task_file import HarborTaskFile, read_supported_task_file
from areal_hpc.dataset.harbor.task_folder import (
    IMAGE_FILE_NAME,
    ROOT_FILE_SYSTEM_NAMES,
    list_readonly_targets,
    list_task_folders,
    read_container_file,
)
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.sandbox.images import read_image

SOURCE_LABEL = "areal-hpc.source"
"""Label of an image with the digest of its sources."""
SAVE_TIMEOUT_S = 1800.0
_MAX_COMPLAINT_CHARS = 500


def build_task_images(path: Path, key: str, print_line: Callable[[str], None]) -> None:
    """Build the missing and outdated images of the tasks at a path."""
    problems = list[Problem]()
    for folder in list_task_folders(path, key):
        try:
            task = read_supported_task_file(folder / "task.toml")
            if needs_image(folder, task) and (source := _compute_new_digest(folder, task)):
                _build_image(folder, task, source)
                print_line(f"{key:<24} {folder.name}: built {IMAGE_FILE_NAME}")
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError.from_problems(problems)


def needs_image(folder: Path, task: HarborTaskFile) -> bool:
    """Return whether a task has no root file system, and its Dockerfile needs a build."""
    if any((folder / "environment" / name).exists() for name in ROOT_FILE_SYSTEM_NAMES):
        return False
    file = folder / "environment" / "Dockerfile"
    if task.environment.docker_image is not None or not file.is_file():
        return task.environment.docker_image is not None
    container = read_container_file(file)
    return bool(container.instructions_needing_build or list_readonly_targets(container))


def _compute_new_digest(folder: Path, task: HarborTaskFile) -> str:
    environment = folder / "environment"
    digest = hashlib.sha256((task.environment.docker_image or "").encode())
    if task.environment.docker_image is None:
        for file in sorted(_list_source_files(environment)):
            name = str(file.relative_to(environment))
            content = bytes(file.readlink()) if file.is_symlink() else file.read_bytes()
            for part in (name.encode(), b"%o" % file.lstat().st_mode, content):
                digest.update(b"%d:" % len(part) + part)
    archive = environment / IMAGE_FILE_NAME
    image = read_image(archive) if archive.is_file() else None
    source = digest.hexdigest()
    return "" if image is not None and image.labels.get(SOURCE_LABEL) == source else source


def _list_source_files(environment: Path) -> Iterator[Path]:
    for path in environment.rglob("*"):
        if path.is_symlink() or (path.is_file() and path != environment / IMAGE_FILE_NAME):
            yield path


def _build_image(folder: Path, task: HarborTaskFile, source_digest: str) -> None:
    podman, tag = shutil.which("podman"), f"localhost/areal-hpc-task:{source_digest[:32]}"
    if podman is None:
        raise RecipeError(
            "its image has to be built, and there is no podman here",
            key=str(folder),
            hint=f"run this where podman is, or put an image at environment/{IMAGE_FILE_NAME}",
        )
    label = f"--label={SOURCE_LABEL}={source_digest}"
    archive = folder / "environment" / IMAGE_FILE_NAME
    with tempfile.TemporaryDirectory(dir=folder, prefix=".image-") as scratch:
        context, file = folder / "environment", folder / "environment" / "Dockerfile"
        if task.environment.docker_image is not None:
            context, file = Path(scratch), Path(scratch, "Dockerfile")
            file.write_text(f"FROM {task.environment.docker_image}\n")
        ignore, own = Path(scratch, "ignored"), context / ".dockerignore"
        ignore.write_text(f"{own.read_text() if own.is_file() else ''}\n{IMAGE_FILE_NAME}\n")
        options = (f"--tag={tag}", label, f"--file={file}", f"--ignorefile={ignore}")
        build = [podman, "build", "--format=oci", *options, str(context)]
        _run_podman(folder, build, task.environment.build_timeout_sec)
        saved = Path(scratch, IMAGE_FILE_NAME)
        save = [podman, "save", "--format=oci-archive", f"--output={saved}", tag]
        _run_podman(folder, save, SAVE_TIMEOUT_S)
        saved.rename(archive)


def _run_podman(folder: Path, command: Sequence[str], timeout_s: float) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        reason = f"podman {command[1]} took longer than {timeout_s:g} s"
    else:
        if result.returncode == 0:
            return
        output = (result.stdout + result.stderr).decode(errors="replace").strip()
        reason = f"podman {command[1]} failed: {output[-_MAX_COMPLAINT_CHARS:]}"
    raise RecipeError(
        f"its image cannot be built: {reason}",
        key=str(folder / "environment"),
        hint="run this where podman works and reaches the registry; its own settings and "
        "variables count, as BUILDAH_ISOLATION",
    )
