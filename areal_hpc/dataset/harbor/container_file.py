"""Dockerfile of a task: what of it can be had without building an image.

FROM, WORKDIR, ENV, COPY and ADD of local files are played out in a sandbox; any other instruction
needs a root file system that somebody has built.
"""

import json
import posixpath
import re
import shlex
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.reward.harbor import resolve_task_path

_HEREDOC_PATTERN = re.compile(r"(?<!<)<<(-?)([\"']?)([A-Za-z_]\w*)\2")
_INSTRUCTIONS_WITHOUT_EFFECT = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL"})
"""Instructions that change no file and no command."""


@dataclass(slots=True)
class ContainerFile:
    work_dir: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[str, str]] = field(default_factory=list)
    """Paths below the build's folder, and their places."""
    instructions_needing_build: list[str] = field(default_factory=list)
    """Instructions that only a build can do."""


def read_container_file(path: Path) -> ContainerFile:
    """The Dockerfile at a path; its paths are those of its own folder."""
    found, stages = ContainerFile(), dict[str, ContainerFile]()
    for line in _split_into_instructions(path.read_text(errors="replace")):
        name, *rest = line.split(maxsplit=1)
        if name.upper() == "FROM":  # only the last stage is what a task runs in
            image, *stage_name = [one for one in "".join(rest).split() if one[:2] != "--"] or [""]
            found = deepcopy(stages.get(image, ContainerFile()))
            stages[stage_name[-1] if stage_name else str(len(stages))] = found
            continue
        try:
            _apply_instruction(found, name.upper(), "".join(rest).strip(), path)
        except ValueError as error:
            raise RecipeError(
                f"{path} has an instruction that cannot be read, {line[:80]!r}: {error}",
                key=str(path),
                hint="write it as Docker takes it, each quote with its end",
            ) from error
    return found


def _split_into_instructions(text: str) -> list[str]:
    escape = re.match(r"\s*#\s*escape\s*=\s*([`\\])", text, re.IGNORECASE)
    mark = re.escape(escape[1] if escape else "\\")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    lines = re.sub(rf"{mark}[ \t]*\n", " ", "\n".join(lines)).splitlines()
    instructions, at = [], 0
    while at < len(lines):
        line, at = lines[at], at + 1
        for dash, _, delimiter in _HEREDOC_PATTERN.findall(line):
            inner = [one.lstrip("\t") if dash else one for one in lines[at:]]
            if delimiter in inner:  # else these marks are no here-document
                at += inner.index(delimiter) + 1
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
    place = posixpath.normpath(posixpath.join(work_dir, target))
    is_folder = target.endswith(("/", "/.")) or len(sources) > 1
    is_folder |= place in ("/", posixpath.normpath(work_dir))
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
        within = posixpath.join(place, posixpath.basename(name))
        pairs.append((name, within if is_folder and file.is_file() else place))
    return pairs
