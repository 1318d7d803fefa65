"""Rows exported in other programs' formats are read back with those programs' own readers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import atif
import msgspec
import pytest
from pyarrow import parquet

from areal_hpc.dataset.demonstrations import parse_demonstration
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.trainer.batch.demonstration_rows import DemonstrationTokenizer
from areal_hpc.view.transcripts.export import ExportFormat, ExportReport, export_rows
from areal_hpc.view.transcripts.row_search import RowQuery, find_rows
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.trajectory import CallRecord, RowKind, RowRecord, TrajectoryRow
from tests.support.chatml import write_model_dir
from tests.support.environments import CHECKOUT
from tests.support.sample_trajectories import seal_in, trajectory
from tests.unit.session.families import QWEN25

GOLDEN = CHECKOUT / "tests" / "golden" / "shard_v2.h5"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call_of(arguments: str) -> dict[str, Any]:
    return {"id": "t1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def conversation(arguments: str = '{"a": 2}') -> TrajectoryRow:
    """Make a tool call and an answer, after an exchange that the client brought along."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call_of(arguments)]},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "tool", "tool_call_id": "t9", "content": "of nobody"},
        {"role": "assistant", "content": "4", "reasoning_content": "Easy."},
    ]
    calls = [
        CallRecord(
            id="a", trained=True, new_messages=4, prompt_tokens=3, reply_tokens=2, tools="h"
        ),
        CallRecord(
            id="b",
            parent_id="a",
            trained=True,
            new_messages=2,
            prompt_tokens=8,
            reply_tokens=4,
            cached_tokens=5,
            answered_at=12.5,
            finish_reason="stop",
            reward=Reward(1.0, {"format": 0.5}),
        ),
    ]
    return replace(
        trajectory(1, 0, tokens=12),
        record=RowRecord(session_id="s", task_index=7, calls=calls),
        meta={"messages": messages},
        tool_schemas={"h": [TOOL]},
    )


def exported(
    paths: RunPaths, file_format: ExportFormat, where: str = "", *, run: Path | None = None
) -> tuple[Path, ExportReport]:
    rows, _ = find_rows(run or paths.root, RowQuery(where))
    out = paths.root / f"rows.{file_format}"
    return out, export_rows(rows, file_format, out, paths, lambda done: None)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def test_every_token_of_a_row_stands_in_json_lines_and_parquet(paths: RunPaths) -> None:
    rows = [conversation(), trajectory(2, 1, tokens=5)]
    seal_in(paths, rows)
    lines = lines_of(exported(paths, "jsonl")[0])
    path, report = exported(paths, "parquet")
    table = parquet.read_table(path).to_pylist()
    assert report == ExportReport(2, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    for row, line, record in zip(rows, lines, table, strict=True):
        for written in (line, record):
            assert written["input_ids"] == row.input_ids_T.tolist()
            assert written["loss_mask"] == row.loss_mask_T.tolist()
            assert written["versions"] == row.versions_T.tolist()
            assert written["logprobs"] == pytest.approx(row.logprobs_T.tolist())
            assert (written["ticket"], written["episode"]) == (row.ticket_id, row.episode)
        assert msgspec.json.decode(record["messages"]) == line["messages"] == row.meta["messages"]
        assert msgspec.json.decode(record["calls"]) == line["calls"]
    assert lines[0]["calls"][1]["reward"]["parts"] == {"format": 0.5}


def test_conversations_for_sft_have_messages_and_tools_and_are_learned(
    paths: RunPaths, tmp_path: Path
) -> None:
    failed = replace(trajectory(3, tokens=0), kind=RowKind.FAILED, meta={})
    seal_in(paths, [conversation(), failed])
    path, report = exported(paths, "sft")
    assert report == ExportReport(written=1, left_out=1)
    (line,) = lines_of(path)
    assert line == {"messages": conversation().meta["messages"], "tools": [TOOL]}
    model = write_model_dir(tmp_path / "model", template=QWEN25)
    (row,) = DemonstrationTokenizer(model).build_rows([parse_demonstration(line)])
    encoder = TokenEncoder.from_model_dir(model)
    prompt, *_, reply = encoder.decode(row.input_ids_T.tolist()).split("<|im_start|>assistant\n")
    assert json.dumps(TOOL) in prompt
    assert encoder.decode(row.input_ids_T[row.loss_mask_T != 0].tolist()).endswith(reply)


def test_a_trajectory_is_valid_atif_with_the_tokens_of_the_shard(paths: RunPaths) -> None:
    row = conversation()
    seal_in(paths, [row])
    (line,) = lines_of(exported(paths, "atif")[0])
    parsed = atif.Trajectory.model_validate(line)
    sources = [step.source for step in parsed.steps]
    assert sources == ["system", "user", "agent", "user", "agent", "agent"]
    brought, calling, answering = (step for step in parsed.steps if step.source == "agent")
    assert brought.is_copied_context
    assert brought.metrics is None
    assert calling.tool_calls
    assert calling.observation
    assert answering.metrics
    assert calling.tool_calls[0].arguments == {"a": 2}
    results = calling.observation.results
    assert [(result.source_call_id, result.content) for result in results] == [
        ("t1", "4"),
        (None, "of nobody"),
    ]
    assert answering.is_copied_context is None
    assert answering.reasoning_content == "Easy."
    assert answering.metrics.prompt_token_ids == row.input_ids_T[:8].tolist()
    assert answering.metrics.completion_token_ids == row.input_ids_T[8:].tolist()
    assert answering.metrics.logprobs == pytest.approx(row.logprobs_T[8:].tolist())
    assert answering.metrics.cached_tokens == 5
    assert parsed.agent.tool_definitions == [TOOL]
    assert parsed.final_metrics
    assert parsed.final_metrics.total_completion_tokens == 6
    assert parsed.extra
    assert parsed.extra["task"] == 7


@pytest.mark.parametrize("file_format", ["sft", "atif"])
def test_a_tool_of_several_calls_stands_once(paths: RunPaths, file_format: ExportFormat) -> None:
    other = {"type": "function", "function": {"name": "stop"}}
    row = conversation()
    first, second = row.record.calls
    record = msgspec.structs.replace(
        row.record, calls=[first, msgspec.structs.replace(second, tools="i")]
    )
    seal_in(paths, [replace(row, record=record, tool_schemas={"h": [TOOL], "i": [other, TOOL]})])
    (line,) = lines_of(exported(paths, file_format)[0])
    tools = line["tools"] if file_format == "sft" else line["agent"]["tool_definitions"]
    assert tools == [TOOL, other]


def test_messages_of_any_shape_are_exported_and_do_not_move_tokens(paths: RunPaths) -> None:
    """An agent may send any messages; the reply is the fourth, whatever the others are."""
    row = conversation()
    odd = {"role": "assistant", "content": 5, "tool_calls": ["add", {"function": "add"}, 7]}
    result = {"role": "tool", "tool_call_id": ["t1"], "content": "of a list"}
    messages = ["no message", odd, result, None, *row.meta["messages"][4:]]
    lone = replace(trajectory(2, 0), meta={"messages": {"role": "user"}})
    seal_in(paths, [replace(row, meta={"messages": messages}), lone])
    first, *_ = lines_of(exported(paths, "atif")[0])
    parsed = atif.Trajectory.model_validate(first)
    brought, calling, answering = parsed.steps
    assert brought.tool_calls
    assert [call.extra for call in brought.tool_calls] == [
        {"arguments": "add"},
        {"arguments": {"function": "add"}},
        {"arguments": 7},
    ]
    assert calling.metrics
    assert calling.metrics.prompt_token_ids == row.input_ids_T[:3].tolist()
    assert answering.message == "4"


@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "sft", "atif"])
def test_the_golden_shard_overwrites_no_file(paths: RunPaths, file_format: ExportFormat) -> None:
    path, report = exported(paths, file_format, run=GOLDEN)
    assert report.written > 0
    before = path.read_bytes()
    with pytest.raises(RecipeError, match="exists"):
        exported(paths, file_format, run=GOLDEN)
    assert path.read_bytes() == before
    if file_format == "atif":
        for line in lines_of(path):
            atif.Trajectory.model_validate(line)
