"""What each page about a run shows, as JSON objects made from the run's files alone."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from areal_hpc.errors import RecipeError
from areal_hpc.metrics.catalogue import find_metric
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.metrics.step_phases import compute_time_shares_by_system_part
from areal_hpc.recipe.loading import flatten_keys_hiding_private_values
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import read_recent_events
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.schema import parse_shard_name
from areal_hpc.view.dashboard.evaluation_set_names import label_evaluation_rows
from areal_hpc.view.dashboard.page_errors import explain_page_error
from areal_hpc.view.dashboard.row_annotation import describe_annotation
from areal_hpc.view.metric_values import list_restart_steps
from areal_hpc.view.shard_report import find_tokenizer_file
from areal_hpc.view.state.alerts_at_newest_step import find_run_alerts, select_failure_alerts
from areal_hpc.view.state.summary import (
    describe_evaluations,
    format_run_progress,
    read_run_progress,
)
from areal_hpc.view.timing.idle_time import read_held_gpus_or_nodes
from areal_hpc.view.transcripts.messages import ShownMessage, list_shown_messages
from areal_hpc.view.transcripts.row_index import RowIndex
from areal_hpc.wire.row_record import CallRecord
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import WeightVersion

MAX_EVENTS = 200

UNKNOWN_METRIC_DESCRIPTION = {"unit": "", "meaning": ""}

JsonObject = dict[str, Any]


def describe_runs(runs: Sequence[RunPaths], states: Sequence[str]) -> list[JsonObject]:
    return [_describe_run(run, state) for run, state in zip(runs, states, strict=True)]


def _describe_run(paths: RunPaths, state: str) -> JsonObject:
    row: JsonObject = {"name": paths.run_name, "state": state, "path": str(paths.root)}
    try:
        return row | _describe_run_progress(paths)
    except Exception as error:  # boundary: one run's files do not hide the other runs
        return row | {"problem": explain_page_error(f"{paths.root} among runs", error)}


def _describe_run_progress(paths: RunPaths) -> JsonObject:
    progress = read_run_progress(paths)
    trained = [one for one in progress.snapshot.steps if "reward/mean" in one]
    size = read_held_gpus_or_nodes(paths, progress.cell_count)
    steps_s = sum(one.get("time/step_s") or 0.0 for one in trained)
    return {
        "hours": size and steps_s / 3600 * (size.trainer_gpus_or_nodes + size.cell_gpus_or_nodes),
        "hours_of": f"{size.unit}-hours" if size else "",
        "step": progress.step,
        "total_steps": progress.total_steps,
        "reward": [one["reward/mean"] for one in trained],
        "reward_steps": [one["step"] for one in trained],
        "held_out": progress.snapshot.evaluations[-1][1] if progress.snapshot.evaluations else None,
        "step_s": trained[-1].get("time/step_s") if trained else None,
        "failures": len(select_failure_alerts(find_run_alerts(paths))),
        "recipe": _flatten_recipe_without_secrets(progress.recipe),
    }


def describe_run_overview(paths: RunPaths, state: str) -> JsonObject:
    progress = read_run_progress(paths)
    rows = progress.snapshot.steps
    return {
        "name": paths.run_name,
        "path": str(paths.root),
        "state": state,
        "progress": [
            line.strip()
            for line in (
                *format_run_progress(progress, paths),
                *describe_evaluations(progress.snapshot),
            )
        ],
        "alerts": [
            {"level": one.level, "rule": one.rule, "message": one.message, "hint": one.hint}
            for one in find_run_alerts(paths)
        ],
        "steps": rows,
        "sft": progress.snapshot.sft,
        "restarts": list_restart_steps(rows),
        "limits": [compute_time_shares_by_system_part(row) for row in rows],
        "events": read_recent_events(paths.events)[-MAX_EVENTS:],
        "recipe": _flatten_recipe_without_secrets(progress.recipe),
    }


def _flatten_recipe_without_secrets(recipe: Mapping[str, Any]) -> dict[str, str]:
    shown = flatten_keys_hiding_private_values(recipe)
    return {key: "" if value is None else str(value) for key, value in shown.items()}


def describe_metrics(paths: RunPaths) -> JsonObject:
    rows = read_metrics(paths.metrics)
    names = sorted({name for row in rows for name in row} - {"step", "unix_time_s"})
    columns = {name: [_get_finite_number(row.get(name)) for row in rows] for name in names}
    return {
        "steps": [row["step"] for row in rows],
        "times": [row.get("unix_time_s") for row in rows],
        "columns": {
            name: column
            for name, column in columns.items()
            if any(value is not None for value in column)
        },
        "catalogue": {name: _get_metric_unit_and_meaning(name) for name in names},
        "restarts": list_restart_steps(rows),
    }


def _get_finite_number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _get_metric_unit_and_meaning(metric_name: str) -> dict[str, str]:
    metric = find_metric(metric_name)
    return (
        {"unit": metric.unit, "meaning": metric.meaning} if metric else UNKNOWN_METRIC_DESCRIPTION
    )


def describe_trajectory(
    paths: RunPaths, index: RowIndex, shard: str, row: int, set_names: Sequence[str]
) -> JsonObject:
    related = index.select_group_and_task_rows(shard, row)
    found = _describe_recorded_row(paths, shard, row) | related
    label_evaluation_rows([found, *related["group"], *related["task_rows"]], set_names)
    fields = _read_task_fields(paths, found)
    return found | {"annotation": describe_annotation(paths, found), "task_fields": fields}


def _describe_recorded_row(paths: RunPaths, shard: str, row: int) -> JsonObject:
    path = paths.shards_dir / shard
    if parse_shard_name(shard) is None or not path.is_file():
        raise RecipeError(f"there is no shard {shard[:100]!r}", key="shard")
    reader = ShardReader(path)
    if not 0 <= row < reader.num_rows:
        raise RecipeError(f"{shard} has rows 0 to {reader.num_rows - 1}, got {row}", key="row")
    (trajectory,) = reader.read_rows([row])
    record = trajectory.record
    return {
        "shard": shard,
        "row": row,
        "kind": trajectory.kind.label,
        "ticket": trajectory.ticket_id,
        "attempt": trajectory.attempt,
        "episode": trajectory.episode,
        "reward": trajectory.reward,
        "temperature": trajectory.temperature,
        "task": record.task_index,
        "cell": record.cell,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "cause": record.cause,
        "error": record.error,
        "ignored": record.ignored,
        "messages": [_describe_message(one) for one in list_shown_messages(trajectory)],
        "tools": list(trajectory.tool_schemas.values()),
        "tokens": _describe_tokens(trajectory, _load_tokenizer(paths)),
    }


def _read_task_fields(paths: RunPaths, row: JsonObject) -> dict[str, str]:
    file, index = paths.dataset("train"), row["task"]
    if "set" in row:
        file, index = paths.evaluation_tasks(row["set"]), row["set_task"]
    try:
        task = TaskSet.read_or_empty(file)[index]
    except (OSError, RecipeError):  # it was moved, or is of a program of the user's
        return {}
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in task.items()
        if name != "messages"
    }


def _describe_message(message: ShownMessage) -> JsonObject:
    return {
        "role": message.role,
        "name": message.name,
        "text": message.text,
        "reasoning": message.reasoning,
        "tool_calls": message.tool_calls,
        "call": _describe_call(message.call) if message.call else None,
    }


def _describe_call(call: CallRecord) -> JsonObject:
    reward = call.reward
    return {
        "seconds": call.answered_at - call.asked_at if call.answered_at else None,
        "prompt_tokens": call.prompt_tokens,
        "reply_tokens": call.reply_tokens,
        "cached_tokens": call.cached_tokens,
        "finish": call.finish_reason,
        "trained": call.trained,
        "reward": reward
        and {
            "value": reward.value,
            "parts": reward.parts,
            "metrics": reward.metrics,
            "note": reward.note,
        },
    }


def _describe_tokens(row: TrajectoryRow, tokenizer: Tokenizer | None) -> JsonObject:
    ids = row.input_ids_T.tolist()
    versions = {one: str(WeightVersion.unpack(one)) for one in set(row.versions_T.tolist()) - {-1}}
    return {
        "ids": ids,
        "texts": _decode_tokens(tokenizer, ids) if tokenizer else None,
        "logprobs": [round(one, 5) for one in row.logprobs_T.tolist()],
        "mask": row.loss_mask_T.tolist(),
        "versions": [versions.get(one) for one in row.versions_T.tolist()],
    }


def _decode_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return list(tokenizer.decode_batch([[one] for one in ids], skip_special_tokens=False))


def _load_tokenizer(paths: RunPaths) -> Tokenizer | None:
    file = find_tokenizer_file(paths)
    return _parse_tokenizer_file_once(file, file.stat().st_mtime_ns) if file else None


@lru_cache(maxsize=4)
def _parse_tokenizer_file_once(file: Path, _changed_at_ns: int) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # boundary: tokenizers raises this class itself
        return None


_ROW_NAME_PATTERN = re.compile(r"(?P<shard>[A-Za-z0-9_.-]{1,200})/(?P<row>\d{1,9})")


def parse_row_name(row_name: str) -> tuple[str, int]:
    match = _ROW_NAME_PATTERN.fullmatch(row_name)
    if match is None:
        raise RecipeError(f"expected SHARD/ROW, got {row_name[:100]!r}", key="row")
    return match["shard"], int(match["row"])
