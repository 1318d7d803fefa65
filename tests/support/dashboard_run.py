"""A small run for the dashboard: all kinds of rows, odd messages, texts that look like scripts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.trajectory import CallRecord, RowKind, RowRecord, TrajectoryRow
from tests.support.sample_trajectories import seal_in, trajectory

INJECTIONS = (
    "<script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "<svg onload=\"document.title='pwned'\">",
    "<svg><script>document.title='pwned'</script></svg>",
    "<iframe srcdoc=\"<script>parent.document.title='pwned'</script>\"></iframe>",
    "<a href=\"javascript:document.title='pwned'\">x</a>",
    "<body onload=\"document.title='pwned'\">",
    "<input autofocus onfocus=\"document.title='pwned'\">",
    "<details open ontoggle=\"document.title='pwned'\">",
    "<style>*{background:url(http://127.0.0.1:9/)}</style>",
    '<link rel=stylesheet href="http://127.0.0.1:9/">',
    '<meta http-equiv="refresh" content="0;url=http://127.0.0.1:9/">',
    '<base href="http://127.0.0.1:9/">',
    "<form action=http://127.0.0.1:9/><button autofocus>x</button></form>",
    '<object data="data:text/html,<script>1</script>"></object>',
    '<embed src="data:text/html,x">',
    "</script><script>document.title='pwned'</script>",
    "</pre></article><script>document.title='pwned'</script>",
    "\"><img src=x onerror=document.title='pwned'>",
    "${document.title='pwned'}`;document.title='pwned'//\u2028\u2029",
)
SECRET = "hf_a-secret-of-the-user"
_RECIPE = f"""
experiment_name: shown
trial_name: run
cluster: {{fileroot: /nowhere, agents: {{variables: {{HF_TOKEN: {SECRET}}}}}}}
trainer: {{total_steps: 9}}
inference: {{cells: 1}}
"""


def make_run(root: Path) -> RunPaths:
    paths = RunPaths(root / "shown" / "run")
    paths.root.mkdir(parents=True)
    paths.recipe.write_text(_RECIPE)
    append_step(paths, 1, 0.25)
    seal_in(paths, [*map(_make_row, range(6))])
    seal_in(paths, [_make_hostile_row(), _make_failed_row(), _make_odd_row()])
    return paths


def append_step(paths: RunPaths, step: int, reward: float, **further: Any) -> None:
    row = {"step": step, "generation": 1, "unix_time_s": 1000.0 + step, "time/step_s": 2.0}
    append_line(paths.metrics, row | {"reward/mean": reward, "episodes": 4} | further)


def _make_row(number: int) -> TrajectoryRow:
    reward = Reward(number / 4, parts={"format": number / 8}, note=f"Note {number}")
    call = CallRecord(
        id=f"r{number}", trained=True, reward=reward, new_messages=1, asked_at=10.0,
        answered_at=10.0 + number, prompt_tokens=3, reply_tokens=3, finish_reason="stop",
    )  # fmt: skip
    record = RowRecord(
        task_index=number % 2, cell="cell-0", started_at=10.0, ended_at=11.0 + number, calls=[call]
    )
    is_held_out = number == 5
    messages = [
        {"role": "user", "content": f"Question {number}: GRÜSSE"},
        {"role": "assistant", "content": f"answer {number}", "reasoning_content": "because"},
    ]
    return dataclasses.replace(
        trajectory(number // 2, number % 2, reward=number / 4),
        kind=RowKind.EVALUATION if is_held_out else RowKind.TRAIN,
        eval_step=3 if is_held_out else -1,
        record=record,
        meta={"messages": messages},
    )


def _make_hostile_row() -> TrajectoryRow:
    messages: list[Any] = []
    for text in INJECTIONS:
        called = {"id": text, "function": {"name": text, "arguments": json.dumps({"x": text})}}
        messages += [
            {"role": text, "name": text, "content": text},
            {"role": "assistant", "content": text, "tool_calls": [called]},
        ]
    record = RowRecord(cell="cell-0", ignored={INJECTIONS[0]: 1})
    return dataclasses.replace(
        trajectory(7, reward=0.5), record=record, meta={"messages": messages}
    )


def _make_failed_row() -> TrajectoryRow:
    record = RowRecord(cause=INJECTIONS[1], error=INJECTIONS[2], cell="cell-1")
    return dataclasses.replace(trajectory(8, reward=0.0), kind=RowKind.FAILED, record=record)


def _make_odd_row() -> TrajectoryRow:
    messages = ["no message", {"role": "assistant", "content": [{"type": "x"}], "tool_calls": 5}]
    return dataclasses.replace(
        trajectory(9, reward=-1.0), kind=RowKind.AUXILIARY, meta={"messages": messages}
    )
