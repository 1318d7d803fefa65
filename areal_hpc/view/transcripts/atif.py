"""Rows as trajectories in ATIF 1.8, the Agent Trajectory Interchange Format of Harbor.

A row becomes one trajectory: its messages are the steps, results of tools stand with the step that
called them, and replies that the row trains or holds carry token ids and log-probabilities. Replies
that a client brought along, or that an earlier row of the episode has already, are copied context.
"""

import json
from datetime import UTC, datetime
from typing import Any

from areal_hpc.view.transcripts.messages import (
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
            "total_prompt_tokens": sum(one["prompt_tokens"] for one in metrics),
            "total_completion_tokens": sum(one["completion_tokens"] for one in metrics),
            "total_cached_tokens": sum(one["cached_tokens"] for one in metrics),
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
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):  # an agent may put anything there
            continue
        if message.get("role") in ("tool", "function") and steps:
            _add_observation(steps[-1], message)
            continue
        source = _SOURCE_BY_ROLE.get(str(message.get("role")), "user")
        step = {"step_id": len(steps) + 1, "source": source}
        step["message"] = extract_text(message.get("content"))
        if source == "agent":
            step |= _build_reply_fields(message, calls.get(place), row)
        steps.append(step)
    return steps


def _build_reply_fields(
    message: JsonObject, call: CallRecord | None, row: TrajectoryRow
) -> JsonObject:
    facts: JsonObject = {}
    if reasoning := message.get("reasoning_content"):
        facts["reasoning_content"] = extract_text(reasoning)
    if called := get_raw_tool_calls(message):
        facts["tool_calls"] = [_build_tool_call(one, at) for at, one in enumerate(called)]
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
    said = function.get("arguments")
    try:
        arguments = json.loads(said) if isinstance(said, str) else said
    except ValueError:
        arguments = None
    if function is not named:
        arguments = None
    made = {
        "tool_call_id": str(call.get("id") or f"call-{call_index}"),
        "function_name": str(function.get("name") or "?"),
    }
    if isinstance(arguments, dict):
        return made | {"arguments": arguments}
    return made | {"arguments": {}, "extra": {"arguments": said}}


def _add_observation(step: JsonObject, message: JsonObject) -> None:
    result: JsonObject = {"content": extract_text(message.get("content"))}
    call_id = message.get("tool_call_id")
    if call_id in [one["tool_call_id"] for one in step.get("tool_calls", ())]:
        result["source_call_id"] = call_id
    elif call_id is not None:
        result["extra"] = {"tool_call_id": call_id}
    step.setdefault("observation", {"results": []})["results"].append(result)
