"""Harbor's task folders as rows of a task set, with an interpreter of simple Dockerfiles.

FROM, WORKDIR, ENV, COPY and ADD of local files take effect in a sandbox without a build; any other
instruction needs a built root file system.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from areal_hpc.dataset.harbor.task_file import HarborTaskFile, read_supported_task_file
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.reward.harbor import (
    HARBOR_FOLDERS,
    HARBOR_TASK_COLUMN,
    HarborTask,
    resolve_task_path,
)
from areal_hpc.sandbox.images import read_image

_HEREDOC_PATTERN = re.compile(r"(?<!<)<<(-?)([\"']?)([A-Za-z_]\w*)\2")
_INSTRUCTIONS_WITHOUT_EFFECT = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL"})
"""Instructions that change neither files nor commands."""


@dataclass(slots=True)
class ContainerFile:
    work_dir: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[str, str]] = field(default_factory=list)
    """Paths below the build's folder, and their targets."""
    instructions_needing_build: list[str] = field(default_factory=list)
    """Instructions that only a build can execute."""


def read_container_file(path: Path) -> ContainerFile:
    """Read a Dockerfile; its paths are relative to its folder."""
    container, stages = ContainerFile(), dict[str, ContainerFile]()
    for line in _split_into_instructions(path.read_text(errors="replace")):
        name, *rest = line.split(maxsplit=1)
        if name.upper() == "FROM":  # a task runs in the last stage alone
            words = [word for word in "".join(rest).split() if word[:2] != "--"]
            image, *stage_name = words or [""]
            container = deepcopy(stages.get(image, ContainerFile()))
            stages[stage_name[-1] if stage_name else str(len(stages))] = container
            continue
        try:
            _apply_instruction(container, name.upper(), "".join(rest).strip(), path)
        except ValueError as error:
            raise RecipeError(
                f"{path} has an instruction that cannot be read, {line[:80]!r}: {error}",
                key=str(path),
                hint="write it as Docker takes it, each quote with its end",
            ) from error
    return container


def _split_into_instructions(text: str) -> list[str]:
    escape = re.match(r"\s*#\s*escape\s*=\s*([`\\])", text, re.IGNORECASE)
    mark = re.escape(escape[1] if escape else "\\")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    lines = re.sub(rf"{mark}[ \t]*\n", " ", "\n".join(lines)).splitlines()
    instructions, index = [], 0
    while index < len(lines):
        line, index = lines[index], index + 1
        for dash, _, delimiter in _HEREDOC_PATTERN.findall(line):
            rest = [later.lstrip("\t") if dash else later for later in lines[index:]]
            if delimiter in rest:  # else the match is no here-document
                index += rest.index(delimiter) + 1
        instructions.append(line.strip())
    return [line for line in instructions if line]


def _apply_instruction(
    container: ContainerFile, instruction: str, arguments: str, dockerfile: Path
) -> None:
    if instruction in _INSTRUCTIONS_WITHOUT_EFFECT:
        return
    if instruction == "WORKDIR" and "$" not in arguments:
        container.work_dir = posixpath.normpath(
            posixpath.join(container.work_dir or "/", arguments)
        )
    elif instruction == "ENV" and "$" not in arguments:
        container.variables |= _parse_variables(arguments)
    elif instruction in ("COPY", "ADD") and _is_plain_local_copy(arguments):
        container.copies += _resolve_local_copies(arguments, container.work_dir or "/", dockerfile)
    else:
        container.instructions_needing_build.append(f"{instruction} {arguments}"[:80])


def _parse_variables(arguments: str) -> dict[str, str]:
    name, mark, value = arguments.partition(" ")
    if mark and "=" not in name:
        return {name: value.strip()}
    return dict(word.partition("=")[::2] for word in shlex.split(arguments))


def _is_plain_local_copy(arguments: str) -> bool:
    options = "--from|--chmod|--exclude|--parents"
    archives = r"\.tar|\.t[gbx]z|\.(?:gz|bz2|xz|zst)\b"
    return not re.search(rf"{options}|https?://|\$|<<|\*|{archives}|git@", arguments)


def _resolve_local_copies(arguments: str, work_dir: str, dockerfile: Path) -> list[tuple[str, str]]:
    options = re.match(r"(?:--[\w-]+(?:=\S+)?\s+)*", arguments)
    words_text = arguments[options.end() if options else 0 :]
    words = json.loads(words_text) if words_text.startswith("[") else shlex.split(words_text)
    *sources, target = words
    target_path = posixpath.normpath(posixpath.join(work_dir, target))
    is_folder = target.endswith(("/", "/.")) or len(sources) > 1
    is_folder |= target_path in ("/", posixpath.normpath(work_dir))
    pairs = []
    for source in sources:
        name = posixpath.normpath(source.lstrip("/"))
        file = dockerfile.parent / name
        if name.startswith("..") or not file.exists():
            raise RecipeError(
                f"{dockerfile} copies {source}, which is not below {dockerfile.parent}",
                key=str(dockerfile),
                hint="put it there",
            )
        resolve_task_path(dockerfile.parent, name)
        path_in_folder = posixpath.join(target_path, posixpath.basename(name))
        pairs.append((name, path_in_folder if is_folder and file.is_file() else target_path))
    return pairs


IMAGE_FILE_NAME = "image.tar"
"""Name of an image in `environment/`, an OCI archive that `areal-hpc prefetch` writes."""
ROOT_FILE_SYSTEM_NAMES = (
    "rootfs",
    "rootfs.tar",
    "rootfs.tar.gz",
    "rootfs.tar.xz",
)
"""Names of a root file system in `environment/`: a folder, or a tar of it."""
_SYSTEM_FOLDERS = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/dev", "/sys")
"""Folders that are read-only unless a task has a root file system."""
_ALWAYS_WRITABLE_FOLDERS = ("/workspace", "/tmp")
"""Folders of every sandbox that commands may write in."""


def list_task_folders(path: Path, key: str) -> list[Path]:
    """List the task folders at a path: the path itself, or the folders in it, by name."""
    if (path / "task.toml").is_file():
        return [path.resolve()]
    folders = sorted(file.parent.resolve() for file in path.glob("*/task.toml"))
    if not folders:
        raise RecipeError(
            f"there is no Harbor task at {path.resolve()}: no task.toml in it or in its folders",
            key=key,
            hint="give a folder of task folders; see docs/data.md",
        )
    return folders


def read_task_folders(path: Path, key: str) -> list[dict[str, Any]]:
    """Read all tasks at a path as rows."""
    rows, problems = [], list[Problem]()
    for folder in list_task_folders(path, key):
        try:
            rows.append(read_task_folder(folder))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError.from_problems(problems)
    return rows


def read_task_folder(folder: Path) -> dict[str, Any]:
    """Read a task as a row: `messages` with its instruction, and the contents of its sandbox."""
    task_file = resolve_task_path(folder, "task.toml")
    task, container = read_supported_task_file(task_file), ContainerFile()
    for name in ("instruction.md", "tests", "solution", "environment/Dockerfile"):
        resolve_task_path(folder, name)
    file, root = folder / "environment" / "Dockerfile", _find_root(folder)
    if file.is_file():
        container = read_container_file(file)
    if problems := [*_find_problems(folder, task, container, root)]:
        raise RecipeError.from_problems(problems)
    image = read_image(Path(root)) if root.endswith(IMAGE_FILE_NAME) else None
    variables, work_dir = container.variables, container.work_dir
    if image is not None:
        variables, work_dir = dict(image.variables), image.work_dir.removeprefix("/")
        work_dir = f"/{work_dir}" if work_dir else ""
    copies = [] if root else container.copies
    work_dir = task.environment.workdir or work_dir
    targets = [*filter(None, [work_dir]), *(target for _, target in copies)]
    environment = task.environment
    harbor_task = HarborTask(
        folder=str(folder),
        root=root,
        has_network=task.has_agent_network,
        work_dir=work_dir,
        variables=variables | environment.env,
        copies=tuple((f"environment/{source}", target) for source, target in copies),
        folders=(*HARBOR_FOLDERS, *_list_writable_folders(targets)),
        memory_bytes=environment.memory_mb and environment.memory_mb << 20,
        disk_bytes=environment.storage_mb and environment.storage_mb << 20,
        agent_timeout_s=task.agent.timeout_sec,
        test_timeout_s=task.verifier.timeout_sec,
        test_variables=task.verifier.env,
        solution_variables=task.solution.env,
    )
    row: dict[str, Any] = {
        "messages": [{"role": "user", "content": (folder / "instruction.md").read_text()}],
        "name": task.task.get("name", folder.name),
        HARBOR_TASK_COLUMN: msgspec.to_builtins(harbor_task),
    }
    if task.agent.timeout_sec is not None:
        row["limits"] = {"timeout_s": task.agent.timeout_sec + task.verifier.timeout_sec}
    return row


def _find_root(folder: Path) -> str:
    for name in (*ROOT_FILE_SYSTEM_NAMES, IMAGE_FILE_NAME):
        if (folder / "environment" / name).exists():
            resolve_task_path(folder, f"environment/{name}")
            return str(folder / "environment" / name)
    return ""


def _find_problems(
    folder: Path, task: HarborTaskFile, container: ContainerFile, root: str
) -> Iterator[Problem]:
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            yield Problem(f"the Harbor task has no {name}", str(folder), "add it")
    if any((folder / "environment").glob("*compose.y*ml")):
        yield Problem(
            "the Harbor task has several containers (compose), a sandbox is one",
            str(folder / "environment"),
            "leave the task out",
        )
    if root:
        return
    hint = f"areal-hpc prefetch RECIPE makes environment/{IMAGE_FILE_NAME}, where podman is"
    if container.instructions_needing_build:
        yield Problem(
            f"its image has to be built: {container.instructions_needing_build[0]}",
            str(folder / "environment" / "Dockerfile"),
            hint,
        )
    if task.environment.docker_image is not None:
        yield Problem(
            f"its image {task.environment.docker_image} has to be fetched",
            str(folder / "task.toml"),
            hint,
        )
    for target in list_readonly_targets(container):
        yield Problem(
            f"its Dockerfile copies to {target}, which is read-only in a sandbox",
            str(folder / "environment" / "Dockerfile"),
            hint,
        )


def list_readonly_targets(container: ContainerFile) -> list[str]:
    """List the copies' targets that are read-only in a sandbox with the node's programs."""

    def is_read_only(target: str) -> bool:
        return any(PurePosixPath(target).is_relative_to(folder) for folder in _SYSTEM_FOLDERS)

    return [target for _, target in container.copies if target == "/" or is_read_only(target)]


def _list_writable_folders(paths: list[str]) -> list[str]:
    tops = dict.fromkeys(f"/{PurePosixPath(path).parts[1]}" for path in paths if path != "/")
    return [
        top
        for top in tops
        if top not in (*_ALWAYS_WRITABLE_FOLDERS, *HARBOR_FOLDERS, *_SYSTEM_FOLDERS)
    ]
