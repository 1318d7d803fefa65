"""The timeline of steps in Chrome's trace format: all is there, and slices nest."""

import json
import random
import stat
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.time_slices_on_lanes import Slice, assign_lanes, iterate_counts_under_way
from areal_hpc.view.timing.timeline import place_step_and_phases
from areal_hpc.view.timing.trace import write_trace
from areal_hpc.wire.row_record import CallRecord, RowRecord
from areal_hpc.wire.trajectory import RowKind
from tests.support.commands import exit_code_of
from tests.support.kept_run import unpack_kept_run
from tests.support.made_run import MadeEpisode, MadeRun
from tests.support.made_spans import add_spans
from tests.support.sample_trajectories import seal_in, trajectory

EPISODES = [
    MadeEpisode(cell=f"cell-{place % 2}", call_s=0.3 + place / 7, tool_s=place / 9)
    for place in range(8)
]


def make_run(root: Path) -> MadeRun:
    run = MadeRun(root)
    for _ in range(4):
        run.add_step(EPISODES, {"checkpoint": 0.3})
        seconds = {"transfer": 0.05, "load": 0.02}
        run.add_event("trainer", "weights_published", version=f"1.{run.step}", seconds=seconds)
        run.add_event("cell-1", "process_exited", exit_code=1)
    return run


def list_events(content: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [one for one in content["traceEvents"] if one["ph"] == kind]


def assert_slices_nest(content: dict[str, Any]) -> None:
    """On a thread a slice lies within another one or beside it, as the format demands."""
    by_thread = defaultdict(list)
    for one in list_events(content, "X"):
        assert one["dur"] >= 0
        by_thread[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for spans in by_thread.values():
        open_ends: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_a_trace_has_phases_calls_episodes_and_events(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    out = tmp_path / "trace.json"
    report = write_trace(run.paths, 2, 3, out)
    assert (report.steps, report.episodes, report.calls) == (2, 16, 32)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    content = json.loads(out.read_text())
    assert_slices_nest(content)
    names = {
        one["pid"]: one["args"]["name"]
        for one in list_events(content, "M")
        if one["name"] == "process_name"
    }
    assert list(names.values()) == [
        *("steps", "trainer-trainer", "cell-0-proxy", "cell-0-driver"),
        *("cell-1-proxy", "cell-1-driver", "events"),
    ]
    slices = list_events(content, "X")
    trainer = [
        (one["name"], one["dur"])
        for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"]))
        if names[one["pid"]] in ("steps", "trainer-trainer")
    ]
    wait = round(1e6 * max(one.duration_s for one in EPISODES))
    step = wait + 500_000 + 100_000 + 300_000
    assert [name for name, _ in trainer] == [
        *("step 2", "batch_wait", "train", "publish", "checkpoint"),
        *("step 3", "batch_wait", "train", "publish", "checkpoint"),
    ]
    assert [took for _, took in trainer[:5]] == pytest.approx(
        [step, wait, 500_000, 100_000, 300_000], abs=2
    )
    calls = [one for one in slices if names[one["pid"]].endswith("-proxy")]
    assert len(calls) == 32
    assert sum(one["dur"] for one in calls) == pytest.approx(
        2e6 * sum(one.calls * one.call_s for one in EPISODES), abs=100
    )
    (published, _) = [one for one in slices if one["name"] == "weights_published"]
    assert published["dur"] == pytest.approx(70_000, abs=2)
    assert [one["name"] for one in list_events(content, "i")] == ["process_exited"] * 2
    counts = [one["args"]["calls at replica 0"] for one in list_events(content, "C")]
    assert max(counts) == 4, "of four episodes at each cell"
    assert counts[-1] == 0


def test_held_out_episodes_of_the_time_are_there_too(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    call = CallRecord(id="e", asked_at=run.now - 3, answered_at=run.now - 2, replica=0)
    near = RowRecord(
        session_id="n", task_index=5, cell="cell-0", started_at=run.now - 4, ended_at=run.now - 1,
        calls=[call],
    )  # fmt: skip
    far = RowRecord(session_id="f", cell="cell-0", started_at=run.now + 99, ended_at=run.now + 100)
    rows = [
        replace(trajectory(ticket), kind=RowKind.EVALUATION, eval_step=4, record=record)
        for ticket, record in enumerate((near, far))
    ]
    seal_in(run.paths, rows)
    report = write_trace(run.paths, 4, 4, tmp_path / "trace.json")
    assert report.episodes == 9
    content = json.loads((tmp_path / "trace.json").read_text())
    assert_slices_nest(content)
    found = [one for one in list_events(content, "X") if one["name"] == "evaluation task 5"]
    assert sorted(one["dur"] for one in found) == [1_000_000, 3_000_000], "its call, and itself"


def test_lanes_never_overlap_and_are_as_few_as_may_be() -> None:
    generator = random.Random(3)
    begins = [generator.uniform(0, 100) for _ in range(500)]
    slices = [Slice("x", begin, begin + generator.uniform(0.1, 9)) for begin in begins]
    lanes = assign_lanes(slices)
    for lane in set(lanes):
        own = sorted(
            (one.begin, one.end) for one, its in zip(slices, lanes, strict=True) if its == lane
        )
        assert all(end <= begin for (_, end), (begin, _) in pairwise(own))
    assert max(lanes) + 1 == max(count for _, count in iterate_counts_under_way(slices))


def test_shards_of_cells_with_spans_are_not_opened_for_held_out_episodes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_spans(run)
    for ticket, cell in enumerate(("cell-0", "cell-1")):
        record = RowRecord(
            session_id=cell, task_index=5, cell=cell, started_at=run.now - 2, ended_at=run.now - 1
        )
        row = replace(trajectory(ticket), kind=RowKind.EVALUATION, eval_step=4, record=record)
        shard = seal_in(run.paths, [row], cell)
        if cell == "cell-0":  # which has spans
            (run.paths.shards_dir / shard.file).write_bytes(b"whoever opens it says so")
    report = write_trace(run.paths, run.step, run.step, tmp_path / "trace.json")
    assert report.problems == ()
    assert report.episodes == 1 + 4 + 1, "a span of cell-0; of cell-1 four rows and a held-out one"


def test_phases_never_leave_their_step() -> None:
    row = {"step": 1, "unix_time_s": 10.0, "time/step_s": 2.0, "time/batch_wait_s": 1.5}
    step, phases = place_step_and_phases(row | {"time/train_s": 1.0, "time/publish_s": 1.0})
    assert (step.begin, step.end) == (8.0, 10.0)
    assert [(one.name, one.begin, one.end) for one in phases] == [
        ("batch_wait", 8.0, 9.5),
        ("train", 9.5, 10.0),
    ]


def test_the_command_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path)
    assert exit_code_of("trace", str(run.paths.root), "--steps", "3") == 0
    assert "made-run-trace.json: 1 steps, 8 episodes, 16 model calls" in capsys.readouterr().out
    assert exit_code_of("trace", str(run.paths.root), "--steps", "3") == 78
    assert exit_code_of("trace", str(run.paths.root), "--steps", "5..3") == 2
    with pytest.raises(RecipeError, match="no step from 50 to 60 has recorded times"):
        write_trace(run.paths, 50, 60, tmp_path / "other.json")
    # Of a version that did not record when a step ended.
    kept = RunPaths(unpack_kept_run(tmp_path / "kept"))
    with pytest.raises(RecipeError, match="has recorded times"):
        write_trace(kept, 1, 5, tmp_path / "other.json")


def test_spans_stand_in_the_place_of_what_shards_say(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_spans(run)
    report = write_trace(run.paths, run.step, run.step, tmp_path / "trace.json")
    assert report.episodes == 1 + 4, "one span of cell-0; cell-1 has none, but four rows"
    content = json.loads((tmp_path / "trace.json").read_text())
    assert_slices_nest(content)
    assert "n01 +5.000 s" in content["otherData"]["note"]
    zero = content["otherData"]["startedAtUnixS"]
    found = {one["name"]: one for one in list_events(content, "X")}
    episode = found["ticket 6 episode 0"]
    assert zero + episode["ts"] / 1e6 == pytest.approx(run.now - 2.9, abs=0.05)
    assert episode["args"]["reward"] == 1.0
    inner = [
        (one["ts"], one["dur"])
        for one in list_events(content, "X")
        if one["name"] == "model call" and one["pid"] == episode["pid"]
    ]
    assert [took for _, took in sorted(inner)] == pytest.approx([700_000, 800_000], abs=1000)
    assert found["batch_wait"]["dur"] == pytest.approx(2e6, abs=1000)
