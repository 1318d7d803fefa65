"""Rows of task sources, and task sets as JSON lines in the run directory.

Sources are files, the cache of the Hugging Face hub, generators and Harbor's task folders.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from areal_hpc.dataset.harbor.task_folder import read_task_folders
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.hub_cache import find_snapshot, parse_hub_files
from areal_hpc.recipe.sections.dataset import TaskSetConfig
from areal_hpc.recipe.user_functions import describe_user_error, load_user_function
from areal_hpc.rundir.files import open_temporary_beside

TaskRow = dict[str, Any]
ROWS_PER_READ = 1024
"""Rows of a Parquet file that are in memory at once as Python objects."""


def iterate_task_rows(config: TaskSetConfig, key: str) -> Iterator[TaskRow]:
    """Yield the rows of the data set at a recipe's key as the agent gets them, at least one."""
    source = _iterate_source_rows(config, key)
    row_key, origin = f"{key}.{config.source_key}", str(getattr(config, config.source_key))
    if config.to_task is not None:
        row_key, origin = f"{key}.to_task", f"{config.to_task}, called with rows of {origin},"
        source = _convert_rows_by_user_function(source, config.to_task, row_key)
    return _check_rows(source, origin, row_key)


def _check_rows(rows: Iterator[Any], origin: str, key: str) -> Iterator[TaskRow]:
    number = -1
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RecipeError(
                f"row {number} is a {type(row).__name__}, expected a dict",
                key=key,
                hint='write it as one, such as {"messages": [...], "answer": ...}',
            )
        yield row
    if number < 0:
        hint = "name a source that has at least one"
        raise RecipeError(f"{origin} gave no row", key=key, hint=hint)


def list_source_paths(config: TaskSetConfig, key: str) -> list[Path]:
    """List the files and folders of a source, in order; none for generated tasks."""
    if config.path is not None:
        if config.is_harbor:
            read_task_folders(config.path, f"{key}.path")
        elif not config.path.exists():
            raise RecipeError(
                f"there is no data set at {config.path.resolve()}",
                key=f"{key}.path",
                hint="give the path of a file, relative to where you start the run",
            )
        return [config.path]
    if config.hub is None:
        return []
    repo, pattern = parse_hub_files(config.hub)
    folder = find_snapshot(repo, "dataset", f"{key}.hub")
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not files:
        raise RecipeError(
            f"no file of {repo} matches {pattern!r} in {folder}",
            key=f"{key}.hub",
            hint="areal-hpc prefetch RECIPE, or name files that the repository has",
        )
    return files


def _iterate_source_rows(config: TaskSetConfig, key: str) -> Iterator[TaskRow]:
    if config.path is not None and config.is_harbor:
        yield from read_task_folders(config.path, f"{key}.path")
    elif config.generator is not None:
        yield from _generate_rows_by_user_function(
            config.generator, config.kwargs, f"{key}.generator"
        )
    else:
        path_key = f"{key}.path" if config.path is not None else f"{key}.hub"
        for path in list_source_paths(config, key):
            yield from _read_file(path, path_key)


def _generate_rows_by_user_function(
    function_path: str, kwargs: dict[str, Any], key: str
) -> Iterator[TaskRow]:
    function = load_user_function(function_path, key)
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        name = function_path.partition(":")[2]
        raise RecipeError(
            f"{function_path} cannot be called with the arguments {kwargs}: {error}",
            key=f"{key.rpartition('.')[0]}.kwargs",
            hint=f"match its signature: {name}{inspect.signature(function)}",
        ) from error
    except ValueError:
        pass  # a function without a signature, written in C
    try:
        yield from function(**kwargs)
    except Exception as error:  # boundary: a user's code may raise anything
        raise RecipeError(
            f"{function_path} raised {describe_user_error(error)}",
            key=key,
            hint="fix the function; it was called with the arguments of kwargs",
        ) from error


def _convert_rows_by_user_function(
    source_rows: Iterator[TaskRow], function_path: str, key: str
) -> Iterator[TaskRow]:
    function = load_user_function(function_path, key)
    for number, row in enumerate(source_rows):
        try:
            task = function(row)
        except Exception as error:  # boundary: the function may be the user's
            raise RecipeError(
                f"{function_path} fails for row {number}: {describe_user_error(error)}\n"
                f"  row: {row!r:.200}",
                key=key,
                hint="use a to_task function that matches this data set",
            ) from error
        if task is not None:
            yield task


def _read_file(path: Path, key: str) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        yield from _read_saved_dataset(path, key)
    elif path.suffix == ".parquet":
        yield from _read_rows_by_pyarrow(path, key, _iterate_parquet_batches)
    else:
        yield from _read_json_lines(path, key)


def _read_json_lines(path: Path, key: str) -> Iterator[dict[str, Any]]:
    hint = "write one JSON object on each line, without empty ones"
    number = 0
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                row = json.loads(line.rstrip("\n"))
                if not isinstance(row, dict):
                    message = f"{path}:{number} holds {type(row).__name__}, expected an object"
                    raise RecipeError(message, key=key, hint=hint)
                yield row
    except json.JSONDecodeError as error:
        message = f"{path}:{number}:{error.colno} is not JSON: {error.msg}"
        raise RecipeError(message, key=key, hint=hint) from error
    except (OSError, UnicodeDecodeError) as error:
        hint = "give a file that you may read, in UTF-8; unpack one that is compressed"
        raise RecipeError(f"{path} cannot be read: {error}", key=key, hint=hint) from error


def _read_saved_dataset(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    state = folder / "state.json"
    if not state.is_file():
        splits = sorted(file.parent.name for file in folder.glob("*/state.json"))
        hint = "pass a directory written by datasets' save_to_disk, or one of Harbor's task folders"
        if splits:
            hint = f"name one of its splits, such as {folder / splits[0]}"
        raise RecipeError(f"the folder {folder} has no state.json", key=key, hint=hint)
    for part in json.loads(state.read_bytes())["_data_files"]:
        yield from _read_rows_by_pyarrow(folder / part["filename"], key, _iterate_arrow_batches)


def _read_rows_by_pyarrow(
    path: Path, key: str, batches: Callable[[Path], Iterator[Any]]
) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
    except ImportError as error:
        raise RecipeError(
            f"{path} needs pyarrow, which cannot be imported ({error})",
            key=key,
            hint='pip install "areal-hpc[main]" in this environment',
        ) from error
    try:
        for batch in batches(path):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", key=key) from error


def _iterate_parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as table:
        yield from table.iter_batches(batch_size=ROWS_PER_READ)


def _iterate_arrow_batches(path: Path) -> Iterator[Any]:
    from pyarrow import memory_map
    from pyarrow.ipc import open_stream

    with memory_map(str(path)) as source, open_stream(source) as reader:
        yield from reader


def materialize_task_sets(
    configs_with_keys: Sequence[tuple[TaskSetConfig, str]],
    jsonl_file: Path,
    check: Callable[[dict[str, Any]], object] = lambda row: None,
) -> list[int]:
    """Write data sets one after another as JSON lines into a file that appears when complete.

    Each data set has its key in the recipe; `check` raises RecipeError for an unusable row.

    Returns:
        The number of rows of each data set.
    """
    counts = []
    with open_temporary_beside(jsonl_file) as stream:
        for config, key in configs_with_keys:
            count, row_key = 0, f"{key}.{config.source_key}"
            for row in iterate_task_rows(config, key):
                stream.write(encode_row(row, count, row_key) + b"\n")
                try:
                    check(row)
                except RecipeError as error:
                    (problem, *_) = error.problems
                    message = f"row {count}, {problem.key}: {problem.message}"
                    raise RecipeError(message, key=row_key, hint=problem.hint) from error
                count += 1
            counts.append(count)
    Path(stream.name).rename(jsonl_file)
    return counts


def encode_row(row: object, row_index: int, key: str = "") -> bytes:
    """Encode a row as strict JSON, so that the driver reads back the same row."""
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
