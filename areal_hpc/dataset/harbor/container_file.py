"""Dockerfile of a task: what of it can be had without building an image.

FROM, WORKDIR, ENV, COPY and ADD of local files are played out in a sandbox; any other instruction
needs a root file system that somebody has built.
"""

import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.errors import RecipeError

_INSTRUCTIONS_WITHOUT_EFFECT = frozenset({"FROM", "LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL"})
"""Instructions that change no file and no command."""


@dataclass(slots=True)
class ContainerFile:
    """What a Dockerfile says."""

    work_dir: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[str, str]] = field(default_factory=list)
    """Paths below the build's folder, and their places."""
    needs_build: list[str] = field(default_factory=list)
    """Instructions that only a build can do."""


def read_container_file(path: Path) -> ContainerFile:
    """The Dockerfile at a path; its paths are those of its own folder.

    Raises:
        RecipeError: A file that it copies is not there, or lies outside.
    """
    found = ContainerFile()
    for line in _split_into_instructions(path.read_text(errors="replace")):
        name, _, rest = line.partition(" ")
        _apply_instruction(found, name.upper(), rest.strip(), path)
    return found


def _split_into_instructions(text: str) -> list[str]:
    """Instructions, each on one line."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _apply_instruction(found: ContainerFile, name: str, rest: str, path: Path) -> None:
    if name in _INSTRUCTIONS_WITHOUT_EFFECT:
        return
    if name == "WORKDIR" and "$" not in rest:
        found.work_dir = posixpath.join(found.work_dir or "/", rest)
    elif name == "ENV" and "$" not in rest:
        found.variables |= _parse_variables(rest)
    elif name in ("COPY", "ADD") and _is_local_copy(rest):
        found.copies += _parse_copies(rest, found.work_dir or "/", path)
    else:
        found.needs_build.append(f"{name} {rest}"[:80])


def _parse_variables(rest: str) -> dict[str, str]:
    """`ENV A=1 B="two words"`, or the older `ENV A 1`."""
    name, mark, value = rest.partition(" ")
    if mark and "=" not in name:
        return {name: value.strip()}
    return dict(word.partition("=")[::2] for word in shlex.split(rest))


def _is_local_copy(rest: str) -> bool:
    return not re.search(r"--from|https?://|\$|<<|\*|\.tar|git@", rest)


def _parse_copies(rest: str, work_dir: str, path: Path) -> list[tuple[str, str]]:
    options = re.match(r"(?:--[\w-]+(?:=\S+)?\s+)*", rest)
    words_text = rest[options.end() if options else 0 :]
    words = json.loads(words_text) if words_text.startswith("[") else shlex.split(words_text)
    *sources, target = words
    place = posixpath.normpath(posixpath.join(work_dir, target))
    is_folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    pairs = []
    for source in sources:
        name = posixpath.normpath(source.lstrip("/"))
        file = path.parent / name
        if name.startswith("..") or not file.exists():
            raise RecipeError(
                f"{path} copies {source}, which is not below {path.parent}",
                key=str(path),
                hint="put it there",
            )
        within = posixpath.join(place, posixpath.basename(name))
        pairs.append((name, within if is_folder and file.is_file() else place))
    return pairs
