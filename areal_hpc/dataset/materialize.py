"""Task sets written as JSON lines into the run directory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from areal_hpc.dataset.sources import iterate_task_rows
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.dataset import TaskSetConfig
from areal_hpc.rundir.files import open_temporary_beside


def materialize_task_sets(
    configs_with_keys: Sequence[tuple[TaskSetConfig, str]],
    jsonl_file: Path,
    check: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[int]:
    """Write data sets one after another as JSON lines, visible whole or not at all.

    Each part has its place in the recipe; `check` raises RecipeError for a row that is of no use.

    Returns:
        The number of rows of each.
    """
    counts = []
    with open_temporary_beside(jsonl_file) as stream:
        for config, key in configs_with_keys:
            count = 0
            for row in iterate_task_rows(config, key):
                stream.write(encode_row(row, count, key) + b"\n")
                try:
                    check(row)
                except RecipeError as error:
                    (problem, *_) = error.problems
                    raise RecipeError(
                        f"row {count}, {problem.key}: {problem.message}", key=key, hint=problem.hint
                    ) from error
                count += 1
            if count == 0:
                raise RecipeError(
                    f"{config.describe_source()} gave no row",
                    key=key,
                    hint="name a source that has at least one",
                )
            counts.append(count)
    Path(stream.name).rename(jsonl_file)
    return counts


def encode_row(row: object, row_index: int, key: str = "") -> bytes:
    """A row as strict JSON: what the driver reads back must be what was written."""
    try:
        return orjson.dumps(row)
    except TypeError as error:
        raise RecipeError(
            f"row {row_index} cannot be serialized as JSON ({error})",
            key=key,
            hint="use strings, numbers, lists and dicts with string keys",
        ) from error


def count_materialized_rows(path: Path) -> int:
    with path.open("rb") as stream:
        return sum(1 for _ in stream)
