"""The timeline of steps in Chrome's trace format: all is there, and slices nest."""

import json
import random
import stat
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.telemetry.spans import Span
from areal_hpc.view.timeline import assign_lanes, iterate_counts_under_way, write_trace
from tests.support.commands import exit_code_of
from tests.support.made_run import MadeEpisode, MadeRun, add_spans

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


def test_lanes_never_overlap_and_are_as_few_as_may_be() -> None:
    generator = random.Random(3)
    begins = [generator.uniform(0, 100) for _ in range(500)]
    slices = [Span("x", begin, begin + generator.uniform(0.1, 9)) for begin in begins]
    lanes = assign_lanes(slices)
    for lane in set(lanes):
        own = sorted(
            (one.begin, one.end) for one, its in zip(slices, lanes, strict=True) if its == lane
        )
        assert all(end <= begin for (_, end), (begin, _) in pairwise(own))
    assert max(lanes) + 1 == max(count for _, count in iterate_counts_under_way(slices))


def test_the_command_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path)
    assert exit_code_of("trace", str(run.paths.root), "--steps", "3") == 0
    assert "made-run-trace.json: 1 steps, 0 episodes, 0 model calls" in capsys.readouterr().out
    assert exit_code_of("trace", str(run.paths.root), "--steps", "3") == 78
    assert exit_code_of("trace", str(run.paths.root), "--steps", "5..3") == 2
    with pytest.raises(RecipeError, match="no step from 50 to 60 has recorded times"):
        write_trace(run.paths, 50, 60, tmp_path / "other.json")


def test_a_trace_has_states_calls_episodes_and_events_in_one_time(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_spans(run)
    out = tmp_path / "trace.json"
    report = write_trace(run.paths, run.step, run.step, out)
    assert (report.steps, report.episodes, report.calls) == (1, 1, 2)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    content = json.loads(out.read_text())
    assert_slices_nest(content)
    names = {
        one["pid"]: one["args"]["name"]
        for one in list_events(content, "M")
        if one["name"] == "process_name"
    }
    assert sorted(names.values()) == [
        *("cell-0-driver (n01)", "cell-0-proxy (n01)", "events", "steps"),
        *("trainer-ledger (n00)", "trainer-trainer (n00)"),
    ]
    (published,) = [one for one in list_events(content, "X") if one["name"] == "weights_published"]
    assert published["dur"] == pytest.approx(70_000, abs=2)
    assert [one["name"] for one in list_events(content, "i")] == ["process_exited"]
    counts = [one["args"]["calls at replica 0"] for one in list_events(content, "C")]
    assert (max(counts), counts[-1]) == (1, 0)
    zero = content["otherData"]["startedAtUnixS"]
    found = {one["name"]: one for one in list_events(content, "X")}
    episode = found["ticket 6 episode 0"]
    assert zero + episode["ts"] / 1e6 == pytest.approx(run.now - 2.9, abs=0.05)
    assert episode["args"]["reward"] == 1.0
    assert episode["args"]["row"].startswith("cell-")
    assert found["batch_wait"]["dur"] == pytest.approx(2e6, abs=1000)
