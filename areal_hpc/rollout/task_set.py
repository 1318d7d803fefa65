"""Task set of a run, read from its JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from areal_hpc.errors import RecipeError


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
