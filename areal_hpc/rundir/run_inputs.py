"""Inputs of a run as its directory keeps them: its resolved recipe, and its task sets.

The recipe is read as plain YAML: looking at a run needs no more, and so runs of older and newer
versions can be looked at, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import yaml

from areal_hpc.errors import RecipeError

PRIVATE_RECIPE_PLACEHOLDER: dict[str, Any] = {"trainer": {}}
"""What others see of a recipe: it may hold keys of other services, and its owner alone reads it."""


def read_run_recipe(path: Path) -> dict[str, Any]:
    """The values of a resolved recipe by section; `PRIVATE_RECIPE_PLACEHOLDER` for another user's.

    Raises:
        RecipeError: There is none, or it is damaged.
    """
    try:
        found = yaml.safe_load(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"expected sections, got {type(found).__name__}")
        if not isinstance(found.get("trainer"), dict):
            raise ValueError("it has no section `trainer`")
    except PermissionError:
        return PRIVATE_RECIPE_PLACEHOLDER
    except (OSError, ValueError, yaml.YAMLError) as error:
        hint = "restore the file from a backup, or from an earlier launch among jobs/"
        message = f"the run's recipe cannot be read: {' '.join(str(error).split())}"
        raise RecipeError(message, key=str(path), hint=hint) from error
    return found


def get_recipe_value(recipe: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key of a recipe as a run keeps it; None if it is not there.

    What stands above it may be damaged, or of another version.
    """
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


class TaskSet:
    """The lines of a JSON-lines file; a task is decoded when asked for, fresh every time."""

    def __init__(self, path: Path, lines: list[bytes]) -> None:
        self._path = path
        self._lines = lines

    @classmethod
    def read(cls, path: Path) -> TaskSet:
        content = path.read_bytes() if path.exists() else b""
        return cls(path, [line for line in content.split(b"\n") if line])

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The task in line `index`."""
        if not 0 <= index < len(self._lines):
            raise RecipeError(f"task {index} was asked for; {self._path} has {len(self)} tasks")
        try:
            task = orjson.loads(self._lines[index])
        except orjson.JSONDecodeError as error:
            raise RecipeError(f"{self._path}:{index + 1} is not JSON: {error}") from error
        if not isinstance(task, dict):
            raise RecipeError(f"{self._path}:{index + 1} is not a JSON object")
        return task
