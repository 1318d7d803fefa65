"""Inputs of a run in its directory: its resolved recipe, and its task sets.

The recipe is read as plain YAML, so that the runs of older and newer versions can be inspected.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
import yaml

from areal_hpc.errors import RecipeError

PRIVATE_RECIPE_PLACEHOLDER: dict[str, Any] = {"trainer": {}}
"""Stand-in for another user's recipe, which only its owner can read: it may hold secret keys."""


def read_run_recipe(path: Path) -> dict[str, Any]:
    """Read a resolved recipe; `PRIVATE_RECIPE_PLACEHOLDER` in place of another user's.

    Raises:
        RecipeError: The recipe is missing or damaged.
    """
    try:
        recipe = yaml.safe_load(path.read_text())
        if not isinstance(recipe, dict):
            raise ValueError(f"expected sections, got {type(recipe).__name__}")
        if not isinstance(recipe.get("trainer"), dict):
            raise ValueError("it has no section `trainer`")
    except PermissionError:
        return PRIVATE_RECIPE_PLACEHOLDER
    except (OSError, ValueError, yaml.YAMLError) as error:
        hint = "restore the file from a backup, or from an earlier launch among jobs/"
        message = f"the run's recipe cannot be read: {' '.join(str(error).split())}"
        raise RecipeError(message, key=str(path), hint=hint) from error
    return recipe


def get_recipe_value(recipe: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key of a run's recipe; None if it is missing.

    The sections above it may be damaged, or of another version.
    """
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, slots=True)
class TrainSources:
    """Sources of the training set, each a range of its tasks; no names if there is one source."""

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    """Number of tasks of each."""

    @classmethod
    def read(cls, sizes_file: Path, names: tuple[str, ...]) -> TrainSources:
        if not names:
            return cls()
        return cls(names, tuple(orjson.loads(sizes_file.read_bytes())))

    def find_index(self, task_index: int) -> int:
        """Return the index of the source of a task."""
        return bisect_right(list(accumulate(self.sizes)), task_index)


NO_SOURCES = TrainSources()


class TaskSet:
    """Tasks of a JSON-lines file, each decoded anew at every access."""

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

        if not 0 <= index < len(self._lines):
            raise RecipeError(f"there is no task {index}: {self._path} has {len(self)} tasks")
        try:
            task = orjson.loads(self._lines[index])
        except orjson.JSONDecodeError as error:
            raise RecipeError(f"{self._path}:{index + 1} is not JSON: {error}") from error
        if not isinstance(task, dict):
            raise RecipeError(f"{self._path}:{index + 1} is not a JSON object")
        return task
