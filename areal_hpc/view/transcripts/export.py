"""Files of recorded rows for other programs: JSON lines, Parquet, conversations for SFT, ATIF."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from areal_hpc import __version__
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.atomic import fsync_path, open_temporary_beside
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import get_recipe_value, read_run_recipe
from areal_hpc.view.transcripts.atif import build_atif_trajectory
from areal_hpc.view.transcripts.messages import describe_row, list_tool_schemas
from areal_hpc.view.transcripts.row_search import FoundRow

ExportFormat = Literal["jsonl", "parquet", "sft", "atif"]
_ROWS_PER_PARQUET_GROUP = 256

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExportReport:
    written: int
    left_out: int
    """Rows without messages, which formats of conversations cannot hold."""


def export_rows(
    rows: Sequence[FoundRow],
    file_format: ExportFormat,
    out: Path,
    paths: RunPaths,
    report_row: Callable[[int], None],
) -> ExportReport:
    """Write rows to a file, which is there whole or not at all; `report_row` hears of each row."""
    if out.exists():
        raise RecipeError(f"{out} exists", key="--out", hint="name another file, or move that one")
    build = _choose_row_builder(file_format, paths)
    counts = {"written": 0, "left_out": 0}

    def build_all() -> Iterator[JsonObject]:
        for number, row in enumerate(rows, 1):
            made = build(row)
            counts["left_out" if made is None else "written"] += 1
            if made is not None:
                yield made
            report_row(number)

    # As private as what the rows hold.
    with open_temporary_beside(out, mode=0o600) as stream:
        if file_format == "parquet":
            _write_parquet(stream, build_all())
        else:
            stream.writelines(msgspec.json.encode(one) + b"\n" for one in build_all())
    Path(stream.name).rename(out)
    fsync_path(out.parent)
    return ExportReport(**counts)


def _choose_row_builder(
    file_format: ExportFormat, paths: RunPaths
) -> Callable[[FoundRow], JsonObject | None]:
    if file_format == "sft":
        return _build_sft_conversation
    if file_format == "atif":
        recipe = read_run_recipe(paths.recipe) if paths.recipe.exists() else {}
        agent = get_recipe_value(recipe, "rollout.workflow") or "agent"
        named = (get_recipe_value(recipe, f"model.{key}") for key in ("hub", "path"))
        name = str(next(filter(None, named), "policy"))
        return lambda row: build_atif_trajectory(row, str(agent), f"areal_hpc {__version__}", name)
    return _build_full_record


def _build_sft_conversation(found_row: FoundRow) -> JsonObject | None:
    row = found_row.read()
    if not (messages := row.meta.get("messages")):
        return None
    tools = list_tool_schemas(row)
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _build_full_record(found_row: FoundRow) -> JsonObject:
    row = found_row.read()
    return {
        "number": found_row.number,
        "shard": found_row.reader.path.name,
        "step": found_row.steps.find_step(row),
        "row": row.row,
        "session": row.record.session_id,
        **describe_row(row),
        "messages": row.meta.get("messages"),
        "tools": row.tool_schemas,
        "calls": msgspec.to_builtins(row.record.calls),
        "input_ids": row.input_ids_T.tolist(),
        "loss_mask": row.loss_mask_T.tolist(),
        "logprobs": row.logprobs_T.tolist(),
        "versions": row.versions_T.tolist(),
    }


def _write_parquet(stream: IO[bytes], objects: Iterator[JsonObject]) -> None:
    """Columns of numbers and texts; what has no fixed shape is JSON text."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        raise RecipeError(
            f"Parquet needs pyarrow, which cannot be imported ({error})",
            key="--format",
            hint="pip install pyarrow, or use --format jsonl",
        ) from error
    texts = ("shard", "kind", "cell", "session", "cause", "error")
    as_json = ("messages", "tools", "calls")
    whole = ("number", "step", "ticket", "attempt", "episode", "row", "task")
    fields = [(name, pa.int64()) for name in whole] + [(name, pa.string()) for name in texts]
    fields += [(name, pa.float64()) for name in ("started_at", "ended_at", "reward", "temperature")]
    fields += [(name, pa.string()) for name in as_json]
    lists = {"input_ids": pa.int32(), "loss_mask": pa.uint8(), "logprobs": pa.float32()}
    lists["versions"] = pa.int64()
    fields += [(name, pa.list_(kind)) for name, kind in lists.items()]
    schema = pa.schema(fields)
    with ParquetWriter(stream, schema, compression="zstd") as writer:
        while group := list(islice(objects, _ROWS_PER_PARQUET_GROUP)):
            encoded = [
                one | {name: msgspec.json.encode(one[name]).decode() for name in as_json}
                for one in group
            ]
            writer.write_table(pa.Table.from_pylist(encoded, schema))
