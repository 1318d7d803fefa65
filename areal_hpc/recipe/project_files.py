"""Files for a new project of the user: a copy of a shipped recipe with its code, or the tutorial's.

The copy includes the recipes that it extends, and the packages below `examples/` that they name.
The project owns these packages: `examples.quickstart.agent` becomes `quickstart.agent`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.checkout import get_shipped_dir
from areal_hpc.recipe.files import EXTENDS_KEY, find_shipped_recipe, list_recipe_files

TUTORIAL_RECIPE = "my_recipe.yaml"
"""Recipe in `examples/tutorial`, which has the agent's module in the same folder."""
CODE_SUFFIXES = (".py", ".yaml")
"""Suffixes of files in which names of packages and recipes are replaced."""
_EXAMPLE_PATTERN = re.compile(r"\bexamples([./])(\w+)(?=[./])")
_EXTENDS_PATTERN = re.compile(rf"(?m)^{EXTENDS_KEY}: .*$")
_RECIPE_PATH_PATTERN = re.compile(r"\brecipes/(?:variants/)?([\w.-]+\.yaml)")


@dataclass(frozen=True, slots=True)
class ProjectFiles:
    """Files to write into a new project's folder."""

    recipe: str
    """Name of the recipe's file."""
    contents: Mapping[str, bytes]
    """Contents of files by their paths in the folder."""


def read_project_files(like: str | None) -> ProjectFiles:
    """Read the files of a shipped recipe with its code; without a name the tutorial's."""
    if like is None:
        folder = get_shipped_dir() / "examples" / "tutorial"
        files = [folder / TUTORIAL_RECIPE, *sorted(folder.glob("my_*.py"))]
        return ProjectFiles(TUTORIAL_RECIPE, {path.name: path.read_bytes() for path in files})
    recipes = list_recipe_files(find_shipped_recipe(like, "--like"))
    contents: dict[str, bytes] = {}
    texts = []
    for path, base in zip(recipes, [*recipes[1:], None], strict=True):
        text = path.read_text()
        if base is not None:
            text = _EXTENDS_PATTERN.sub(f"{EXTENDS_KEY}: {base.name}", text)
        texts.append(text)
        contents[path.name] = _rename_paths(text).encode()
    for package in _find_packages(texts):
        contents |= _read_package(package)
    return ProjectFiles(recipes[0].name, contents)


def _find_packages(texts: list[str]) -> list[Path]:
    packages: dict[Path, None] = {}
    waiting = list(texts)
    while waiting:
        for _, name in _EXAMPLE_PATTERN.findall(waiting.pop()):
            folder = get_shipped_dir() / "examples" / name
            if folder.is_dir() and folder not in packages:
                packages[folder] = None
                waiting += [path.read_text() for path in folder.glob("*.py")]
    return list(packages)


def _read_package(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            if path.suffix in CODE_SUFFIXES:
                content = _rename_paths(content.decode()).encode()
            yield path.relative_to(folder.parent).as_posix(), content


def _rename_paths(text: str) -> str:
    return _RECIPE_PATH_PATTERN.sub(r"\1", _EXAMPLE_PATTERN.sub(r"\2", text))
