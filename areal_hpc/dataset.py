"""Task sets: JSON lines on disk, or a generator named by its dotted path."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import orjson
from pydantic import Field, model_validator

from areal_hpc.config import StageConfig
from areal_hpc.errors import RecipeError


class DatasetConfig(StageConfig):
    """Where tasks come from: exactly one of `path` and `generator`."""

    path: Path | None = None
    """A file of JSON lines; each object is handed to the agent as `data`."""
    generator: str | None = None
    """`package.module:function` that returns JSON-able dicts."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the generator."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.generator is None):
            raise ValueError("give exactly one of `path` and `generator`")
        return self


class TaskSourceConfig(DatasetConfig):
    """One of several sources of tasks."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the tickets, relative to the others; kept to a thousandth."""


class TrainDatasetConfig(DatasetConfig):
    """Where tasks come from: exactly one of `path`, `generator` and `sources`."""

    sources: tuple[TaskSourceConfig, ...] = ()
    """Several sources, mixed by weight; a list of what follows."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [self.path is None, self.generator is None, not self.sources].count(False) != 1:
            raise ValueError("give exactly one of `path`, `generator` and `sources`")
        return self

    def parts(self, key: str) -> list[tuple[DatasetConfig, str]]:
        """The sources, each with its place in the recipe; `key` is that of this section."""
        if not self.sources:
            return [(self, key)]
        return [(source, f"{key}.sources.{place}") for place, source in enumerate(self.sources)]


def rows(config: DatasetConfig, key: str) -> Iterator[dict[str, Any]]:
    """The data set, row by row.

    Args:
        config: Where it comes from.
        key: Its place in the recipe, for errors.

    Raises:
        RecipeError: The file is missing, a line is no JSON object, or the generator failed.
    """
    if config.path is not None:
        yield from _lines(config.path, f"{key}.path")
    else:
        assert config.generator is not None
        yield from _generated(config.generator, config.kwargs, f"{key}.generator")


def _lines(path: Path, key: str) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise RecipeError(
            f"there is no data set at {path.resolve()}",
            key=key,
            hint="give the path of a JSON-lines file, relative to where you start the run",
        )
    with path.open() as stream:
        for number, line in enumerate(stream, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise RecipeError(f"{path}:{number} is not JSON: {error}", key=key) from error
            if not isinstance(row, dict):
                raise RecipeError(
                    f"{path}:{number} holds {type(row).__name__}, expected an object", key=key
                )
            yield row


def _generated(dotted: str, kwargs: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    module, colon, name = dotted.partition(":")
    if not colon:
        raise RecipeError(f"expected `package.module:function`, got {dotted!r}", key=key)
    try:
        function = getattr(importlib.import_module(module), name)
        yield from function(**kwargs)
    except Exception as error:  # boundary: a user's code may raise anything
        raise RecipeError(
            f"{dotted} fails with arguments {kwargs} ({type(error).__name__}: {error})",
            key=key,
            hint="start the run from the folder that holds the package",
        ) from error


def materialise(
    parts: Sequence[tuple[DatasetConfig, str]],
    out: Path,
    check: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[int]:
    """Write data sets one after another as JSON lines, visible whole or not at all.

    Args:
        parts: Each with its place in the recipe.
        out: The file.
        check: Raises RecipeError for a row that is of no use.

    Returns:
        The number of rows of each.

    Raises:
        RecipeError: As `rows` and `check`, or a data set is empty.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.tmp")
    counts = []
    with partial.open("w") as stream:
        for config, key in parts:
            count = 0
            for row in rows(config, key):
                stream.write(_as_line(row, count, key))
                _apply(check, row, count, key)
                count += 1
            if count == 0:
                partial.unlink()
                raise RecipeError("the data set is empty", key=key)
            counts.append(count)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(out)
    return counts


def _apply(
    check: Callable[[dict[str, Any]], None], row: dict[str, Any], number: int, key: str
) -> None:
    """Check a row, and say which it is.

    Raises:
        RecipeError: It did not pass.
    """
    try:
        check(row)
    except RecipeError as error:
        problem = error.problems[0]
        raise RecipeError(
            f"row {number}, {problem.key}: {problem.message}", key=key, hint=problem.hint
        ) from error


def _as_line(row: object, number: int, key: str) -> str:
    """One line of strict JSON: what the driver reads back must be what was written."""
    try:
        return orjson.dumps(row).decode() + "\n"
    except TypeError as error:
        raise RecipeError(
            f"row {number} is not JSON-able ({error})",
            key=key,
            hint="use strings, numbers, lists and dicts with string keys",
        ) from error


def count_rows(path: Path) -> int:
    """Lines of a materialised data set."""
    with path.open("rb") as stream:
        return sum(1 for _ in stream)
