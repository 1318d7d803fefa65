"""Files of rows: JSON lines, Parquet, and folders that `datasets` saved."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError

ROWS_PER_READ = 1024
"""Rows of a Parquet file that are held in memory as Python objects."""


def iterate_dataset_file_rows(path: Path, key: str) -> Iterator[dict[str, Any]]:
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
        splits = sorted(found.parent.name for found in folder.glob("*/state.json"))
        hint = "pass a directory written by datasets' save_to_disk"
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
