"""Files of recorded rows for other programs: JSON lines, Parquet, conversations for SFT, ATIF.

In ATIF 1.8, the Agent Trajectory Interchange Format of Harbor, a row becomes one trajectory: its
messages are the steps, results of tools are part of the step that called them, and replies that the
row trains or holds have token ids and log-probabilities. Replies that a client brought along, or
that an earlier row of the episode has already, are copied context.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from areal_hpc import __version__
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.files import fsync_path, open_temporary_beside
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import get_recipe_value, read_run_recipe
from areal_hpc.view.transcripts.messages import (
    describe_row,
    extract_text,
    get_raw_tool_calls,
    list_tool_schemas,
    locate_calls,
)
from areal_hpc.view.transcripts.row_search import FoundRow
from areal_hpc.wire.trajectory import CallRecord, TrajectoryRow

SCHEMA_VERSION = "ATIF-v1.8"
_SOURCE_BY_ROLE = {"system": "system", "developer": "system", "assistant": "agent"}

JsonObject = dict[str, Any]


def build_atif_trajectory(
    found_row: FoundRow, agent: str, agent_version: str, model: str
) -> JsonObject:
    row = found_row.read()
    record = row.record
    steps = _build_steps(row)
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    tools = list_tool_schemas(row)
    session = {"session_id": record.session_id} if record.session_id else {}
    return {
        "schema_version": SCHEMA_VERSION,
        **session,
        "trajectory_id": f"{found_row.reader.path.stem}-{found_row.row}",
        "agent": {
            "name": agent,
            "version": agent_version,
            "model_name": model,
            **({"tool_definitions": tools} if tools else {}),
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(reply["prompt_tokens"] for reply in metrics),
            "total_completion_tokens": sum(reply["completion_tokens"] for reply in metrics),
            "total_cached_tokens": sum(reply["cached_tokens"] for reply in metrics),
            "total_steps": len(steps),
            "extra": {"reward": row.reward},
        },
        "extra": {
            "kind": row.kind.label,
            "step": found_row.steps.find_step(row),
            "ticket": row.ticket_id,
            "attempt": row.attempt,
            "episode": row.episode,
            "row": row.row,
            "task": record.task_index,
            "temperature": row.temperature,
            **({"error": record.error} if record.error else {}),
        },
    }


def _build_steps(row: TrajectoryRow) -> list[JsonObject]:
    calls = dict(locate_calls(row.record.calls))
    steps: list[JsonObject] = []
    messages = row.meta.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):  # an agent may put anything there
            continue
        if message.get("role") in ("tool", "function") and steps:
            _add_observation(steps[-1], message)
            continue
        source = _SOURCE_BY_ROLE.get(str(message.get("role")), "user")
        step = {"step_id": len(steps) + 1, "source": source}
        step["message"] = extract_text(message.get("content"))
        if source == "agent":
            step |= _build_reply_fields(message, calls.get(index), row)
        steps.append(step)
    return steps


def _build_reply_fields(
    message: JsonObject, call: CallRecord | None, row: TrajectoryRow
) -> JsonObject:
    facts: JsonObject = {}
    if reasoning := message.get("reasoning_content"):
        facts["reasoning_content"] = extract_text(reasoning)
    if raw_calls := get_raw_tool_calls(message):
        facts["tool_calls"] = [_build_tool_call(raw, index) for index, raw in enumerate(raw_calls)]
    if call is None:
        return facts | {"is_copied_context": True}
    if call.answered_at:
        facts["timestamp"] = datetime.fromtimestamp(call.answered_at, UTC).isoformat()
    if not call.trained:
        facts["is_copied_context"] = True
    prompt, end = call.prompt_tokens, call.prompt_tokens + call.reply_tokens
    extra: JsonObject = {"finish_reason": call.finish_reason, "sampling": call.sampling}
    if call.reward:
        extra["reward"] = call.reward.value
        extra |= {f"reward.{name}": value for name, value in call.reward.parts.items()}
    return facts | {
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": prompt,
            "completion_tokens": call.reply_tokens,
            "cached_tokens": call.cached_tokens,
            "prompt_token_ids": row.input_ids_T[:prompt].tolist(),
            "completion_token_ids": row.input_ids_T[prompt:end].tolist(),
            "logprobs": row.logprobs_T[prompt:end].tolist(),
            "extra": extra,
        },
    }


def _build_tool_call(raw_call: object, call_index: int) -> JsonObject:
    call = raw_call if isinstance(raw_call, dict) else {}
    named = call.get("function")
    function = named if isinstance(named, dict) else {"arguments": raw_call}
    raw_arguments = function.get("arguments")
    try:
        arguments = json.loads(raw_arguments) if isinstance(raw_arguments, str) else raw_arguments
    except ValueError:
        arguments = None
    if function is not named:
        arguments = None
    tool_call = {
        "tool_call_id": str(call.get("id") or f"call-{call_index}"),
        "function_name": str(function.get("name") or "?"),
    }
    if isinstance(arguments, dict):
        return tool_call | {"arguments": arguments}
    return tool_call | {"arguments": {}, "extra": {"arguments": raw_arguments}}


def _add_observation(step: JsonObject, message: JsonObject) -> None:
    result: JsonObject = {"content": extract_text(message.get("content"))}
    call_id = message.get("tool_call_id")
    if call_id in [call["tool_call_id"] for call in step.get("tool_calls", ())]:
        result["source_call_id"] = call_id
    elif call_id is not None:
        result["extra"] = {"tool_call_id": call_id}
    step.setdefault("observation", {"results": []})["results"].append(result)


ExportFormat = Literal["jsonl", "parquet", "sft", "atif"]
_ROWS_PER_PARQUET_GROUP = 256


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
    """Write rows to a file, completely or not at all; `report_row` receives the count of rows."""
    if out.exists():
        raise RecipeError(f"{out} exists", key="--out", hint="name another file, or move that one")
    build = _choose_row_builder(file_format, paths)
    counts = {"written": 0, "left_out": 0}

    def build_all() -> Iterator[JsonObject]:
        for number, row in enumerate(rows, 1):
            built = build(row)
            counts["left_out" if built is None else "written"] += 1
            if built is not None:
                yield built
            report_row(number)

    # The file is as private as the rows are.
    with open_temporary_beside(out, mode=0o600) as stream:
        if file_format == "parquet":
            _write_parquet(stream, build_all())
        else:
            stream.writelines(msgspec.json.encode(record) + b"\n" for record in build_all())
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
        names = (get_recipe_value(recipe, f"model.{key}") for key in ("hub", "path"))
        name = str(next(filter(None, names), "policy"))
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
    """Write columns of numbers and texts; values without a fixed shape become JSON text."""
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
                row | {name: msgspec.json.encode(row[name]).decode() for name in as_json}
                for row in group
            ]
            writer.write_table(pa.Table.from_pylist(encoded, schema))
