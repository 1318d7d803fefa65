"""Data of each page about a run, as JSON objects made from the run's files alone."""

import json
import logging
import math
import re
import shlex
import sqlite3
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from areal_hpc.errors import ArealError, RecipeError
from areal_hpc.metrics.step_line import compute_trained_tokens_per_s
from areal_hpc.metrics.step_metrics import (
    find_metric,
    find_step_bottleneck,
    read_metrics,
    select_trained_rows,
)
from areal_hpc.recipe.keys import flatten_keys_hiding_private_values, hide_private_arguments
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import TaskSet
from areal_hpc.rundir.telemetry.events import read_all_events
from areal_hpc.rundir.telemetry.token_annotations import (
    UNTRAINED_TOKEN_REASONS,
    RowAnnotation,
    find_row_annotation,
)
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.schema import parse_shard_name
from areal_hpc.view.answers.collapse import diagnose_collapse
from areal_hpc.view.answers.reward_hacking import diagnose_reward_hacking
from areal_hpc.view.answers.slow_run import explain_slow_run
from areal_hpc.view.audit import audit_run
from areal_hpc.view.dashboard.evaluation_page import label_evaluation_rows
from areal_hpc.view.diagnosis import describe_reason
from areal_hpc.view.events import count_unusual_events
from areal_hpc.view.formatting import (
    Answer,
    format_duration,
    format_value,
    get_number,
    list_numbers,
    list_restart_steps,
)
from areal_hpc.view.shard_report import find_tokenizer_file
from areal_hpc.view.state.run_view import RunView
from areal_hpc.view.state.summary import (
    describe_evaluations,
    format_run_progress,
)
from areal_hpc.view.transcripts.messages import ShownMessage, describe_row, list_shown_messages
from areal_hpc.view.transcripts.row_index import RowIndex
from areal_hpc.wire.trajectory import CallRecord, TrajectoryRow
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

MAX_EVENTS = 200
_NUMBER_TYPE_BY_FIELD = (
    ("advantages", "<f2"),
    ("logprobs", "<f4"),
    ("entropies", "<f2"),
    ("ratios", "<f2"),
)
_logged: set[tuple[str, str]] = set()
"""Pages with the errors that were logged: browsers request an open page repeatedly."""
JsonObject = dict[str, Any]


def explain_page_error(page: str, error: Exception) -> str:
    """Return the reason for the reader; log an unexpected error's traceback once for a `page`."""
    if isinstance(error, ArealError):
        return str(error)
    if isinstance(error, OSError | sqlite3.Error):
        return f"cannot be read: {error}"
    kind = type(error).__name__
    reason = f"{kind}: {error}"
    if (page, reason) not in _logged:
        _logged.add((page, reason))
        log.warning("%s cannot be shown", page, exc_info=error)
    return f"the run's files are damaged, or of another version of areal-hpc ({reason})"


def describe_run(view: RunView) -> JsonObject:
    paths = view.paths
    row: JsonObject = {"name": paths.run_name, "state": view.state, "path": str(paths.root)}
    try:
        return row | _describe_run_progress(view)
    except Exception as error:  # boundary: one run's files do not hide the other runs
        return row | {"problem": explain_page_error(f"{paths.root} among runs", error)}


def _describe_run_progress(view: RunView) -> JsonObject:
    trained, size = view.trained_rows, view.held_resources
    steps_s = sum(row.get("time/step_s") or 0.0 for row in trained)
    return {
        "hours": size and steps_s / 3600 * (size.trainer + size.cells),
        "hours_of": f"{size.unit}-hours" if size else "",
        "step": view.step,
        "total_steps": view.total_steps,
        "reward": [row["reward/mean"] for row in trained],
        "reward_steps": [row["step"] for row in trained],
        "held_out": view.evaluations[-1][1] if view.evaluations else None,
        "step_s": trained[-1].get("time/step_s") if trained else None,
        "failures": len(view.failure_alerts),
        "recipe": _flatten_recipe_without_secrets(view.recipe),
    }


def describe_run_overview(view: RunView) -> JsonObject:
    rows, times = view.steps, view.step_times
    return {
        "name": view.paths.run_name,
        "path": str(view.paths.root),
        "state": view.state,
        "progress": [
            line.strip()
            for line in (
                *describe_reason(view),
                *format_run_progress(view),
                *describe_evaluations(view),
            )
        ],
        "alerts": [
            {"level": alert.level, "rule": alert.rule, "message": alert.message, "hint": alert.hint}
            for alert in view.alerts
        ],
        "steps": rows,
        "sft": view.sft,
        "restarts": list_restart_steps(rows),
        "step_times": times and times._asdict(),
        "events": view.recent_events[-MAX_EVENTS:],
        "recipe": _flatten_recipe_without_secrets(view.recipe),
    }


def _flatten_recipe_without_secrets(recipe: Mapping[str, Any]) -> dict[str, str]:
    shown = flatten_keys_hiding_private_values(recipe)
    return {key: "" if value is None else str(value) for key, value in shown.items()}


def describe_metrics(paths: RunPaths) -> JsonObject:
    rows = read_metrics(paths.metrics)
    names = sorted({name for row in rows for name in row} - {"step", "unix_time_s"})
    known = {name: find_metric(name) for name in names}
    return {
        "steps": [row["step"] for row in rows],
        "times": [row.get("unix_time_s") for row in rows],
        "columns": {
            name: [get_number(row, name) for row in rows]
            for name in names
            if list_numbers(rows, name)
        },
        "catalogue": {
            name: {"unit": entry.unit if entry else "", "meaning": entry.meaning if entry else ""}
            for name, entry in known.items()
        },
        "restarts": list_restart_steps(rows),
    }


def describe_trajectory(
    paths: RunPaths, index: RowIndex, shard: str, row: int, set_names: Sequence[str]
) -> JsonObject:
    related = index.select_related_rows(shard, row)
    described = _describe_recorded_row(paths, shard, row) | related
    label_evaluation_rows([described, *related["group"], *related["task_rows"]], set_names)
    fields = _read_task_fields(paths, described)
    return described | {"annotation": _describe_annotation(paths, described), "task_fields": fields}


def _describe_recorded_row(paths: RunPaths, shard: str, row: int) -> JsonObject:
    path = paths.shards_dir / shard
    if parse_shard_name(shard) is None or not path.is_file():
        raise RecipeError(f"there is no shard {shard[:100]!r}", key="shard")
    reader = ShardReader(path)
    if not 0 <= row < reader.num_rows:
        raise RecipeError(f"{shard} has rows 0 to {reader.num_rows - 1}, got {row}", key="row")
    (trajectory,) = reader.read_rows([row])
    return {
        "shard": shard,
        "row": row,
        **describe_row(trajectory),
        "ignored": trajectory.record.ignored,
        "messages": [_describe_message(message) for message in list_shown_messages(trajectory)],
        "tools": list(trajectory.tool_schemas.values()),
        "tokens": _describe_tokens(trajectory, _load_tokenizer(paths)),
    }


def _read_task_fields(paths: RunPaths, row: JsonObject) -> dict[str, str]:
    file, index = paths.dataset("train"), row["task"]
    if "set" in row:
        file, index = paths.evaluation_tasks(row["set"]), row["set_task"]
    try:
        task = TaskSet.read(file)[index]
    except (OSError, RecipeError):  # moved, or generated by a program of the user
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
    return {
        "seconds": call.answered_at - call.asked_at if call.answered_at else None,
        "prompt_tokens": call.prompt_tokens,
        "reply_tokens": call.reply_tokens,
        "cached_tokens": call.cached_tokens,
        "agent": call.agent_id,
        "finish": call.finish_reason,
        "trained": call.trained,
        "reward": call.reward and msgspec.structs.asdict(call.reward),
    }


def _describe_tokens(row: TrajectoryRow, tokenizer: Tokenizer | None) -> JsonObject:
    ids = row.input_ids_T.tolist()
    packed_versions = row.versions_T.tolist()
    versions = {packed: str(WeightVersion.unpack(packed)) for packed in {*packed_versions} - {-1}}
    return {
        "ids": ids,
        "texts": [*tokenizer.decode_batch([[id_] for id_ in ids], skip_special_tokens=False)]
        if tokenizer
        else None,
        "logprobs": [round(logprob, 5) for logprob in row.logprobs_T.tolist()],
        "mask": row.loss_mask_T.tolist(),
        "versions": [versions.get(packed) for packed in packed_versions],
    }


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


def _describe_annotation(paths: RunPaths, row_description: Mapping[str, Any]) -> JsonObject | None:
    """Describe the annotation of a row; None if no batch had the row or it has no annotation."""
    step, shard, row = (row_description[name] for name in ("step", "shard", "row"))
    if step is None:
        return None
    annotation = find_row_annotation(paths, step, shard, row)
    if annotation is None:
        return None
    return {"step": step} | build_token_columns(annotation, row_description["tokens"]["mask"])


def build_token_columns(annotation: RowAnnotation, mask: Sequence[int]) -> JsonObject:
    """Return an annotation as columns of the row's tokens: null for tokens without values. Pure."""
    positions = np.flatnonzero(np.asarray(mask) == 1)
    columns: JsonObject = {
        name: _scatter_to_tokens(
            np.frombuffer(getattr(annotation, name), kind), positions, len(mask)
        )
        for name, kind in _NUMBER_TYPE_BY_FIELD
    }
    codes = _scatter_to_tokens(np.frombuffer(annotation.reasons, np.uint8), positions, len(mask))
    columns["reasons"] = [UNTRAINED_TOKEN_REASONS[int(code)] if code else "" for code in codes]
    return {"outcome": annotation.outcome, "advantage": annotation.advantage, **columns}


def _scatter_to_tokens(
    values: npt.NDArray[Any], positions: npt.NDArray[np.int64], size: int
) -> list[float | None]:
    column: list[float | None] = [None] * size
    if len(values) == len(positions):  # a row that was left out has no values
        for position, value in zip(positions.tolist(), values.astype(float).tolist(), strict=True):
            column[position] = round(value, 5) if math.isfinite(value) else None
    return column


MAX_SHOWN_EVENTS = 12


def describe_summary(view: RunView) -> JsonObject:
    paths = view.paths
    return {
        "facts": list(_list_facts(view)),
        "audit": list(_describe_audit(paths)),
        "answers": [
            describe_answer(answer)
            for answer in (
                explain_slow_run(paths),
                diagnose_collapse(paths),
                diagnose_reward_hacking(paths),
            )
        ],
        "events": count_unusual_events(read_all_events(paths.events), MAX_SHOWN_EVENTS),
        "launches": [list(_describe_launch(launch)) for launch in view.launches],
        "profiles": [
            {"file": str(path.relative_to(paths.profiles_dir)), "bytes": path.stat().st_size}
            for path in paths.list_profiles()
        ],
    }


def describe_answer(answer: Answer) -> JsonObject:
    findings = [{"text": finding.text, "page": finding.page} for finding in answer.findings]
    return {"headline": answer.headline, "findings": findings, "hints": answer.hints}


def _describe_audit(paths: RunPaths) -> Iterator[str]:
    try:
        audit = audit_run(paths)
    except (ArealError, OSError) as error:
        yield f"not audited: {error}"
        return
    yield audit.summary_line
    yield from (f"problem: {problem}" for problem in audit.problems[:5])
    if audit.untrained:
        count = len(audit.untrained)
        yield f"{count} parts of batches were not trained: areal-hpc audit lists them"


def _list_facts(view: RunView) -> Iterator[tuple[str, str]]:
    rows = select_trained_rows(view.steps)
    launches, ends = view.launch_times, list_numbers(rows, "unix_time_s")
    steps_s = sum(list_numbers(rows, "time/step_s"))
    if launches and ends:
        wall_s = ends[-1] - launches[0][1]
        yield "wall time", f"{format_duration(wall_s)} from the first launch to the last step"
    if steps_s:
        yield "time of steps", format_duration(steps_s)
    limits = Counter(limit for row in rows if (limit := find_step_bottleneck(row)) is not None)
    if limits:
        text = ", ".join(f"{count} by {limit}" for limit, count in limits.most_common())
        yield "steps limited", text
    yield "restarts of the trainer survived", str(len(list_restart_steps(rows)))
    if (tokens := sum(list_numbers(rows, "tokens/trained"))) and steps_s:
        speed = compute_trained_tokens_per_s(rows)
        yield "tokens trained", f"{tokens:,.0f}, {speed:.0f} a second over all phases"
    if mfu := list_numbers(rows, "throughput/mfu"):
        yield "model FLOP/s utilization", f"{statistics.fmean(mfu):.1%} while training"
    for metric, title, choose in (
        ("memory/trainer_peak_bytes", "most memory of a rank", max),
        ("disk/free_bytes", "least room on the storage", min),
    ):
        if values := list_numbers(rows, metric):
            yield title, format_value(metric, choose(values))
    yield "failed tries of episodes", f"{sum(list_numbers(rows, 'episode/failures')):.0f}"


def _describe_launch(launch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("attempt", "time", "host"):
        yield name, str(launch.get(name))
    command = [*map(str, launch.get("command") or ())]
    yield "command", shlex.join(hide_private_arguments(command))
    commit = launch.get("git_commit") or "not known"
    yield "areal_hpc", f"{launch.get('areal_hpc')} (commit {commit})"
    yield "GPU driver", str(launch.get("gpu_driver") or "none")
    user = (launch.get("repositories") or {}).get("user") or {}
    yield "code", str(user.get("revision") or "not recorded")
    for name, environment in (launch.get("environments") or {}).items():
        if isinstance(environment, dict):
            packages = (environment.get("packages") or {}).items()
            versions = [f"{package} {version}" for package, version in packages]
            text = ", ".join([f"Python {environment.get('python')}", *versions])
            yield f"{name} environment", text
