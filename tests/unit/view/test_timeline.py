"""Timeline of steps: lanes as fine as a screen, and Chrome's trace, in which slices nest."""

import json
import random
import stat
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import areal_hpc
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.jsonl import append_lines
from areal_hpc.rundir.telemetry.spans import ProcessStart, Span
from areal_hpc.view.dashboard.app import encode_browser_json
from areal_hpc.view.dashboard.timeline_page import (
    MAX_LANES_PER_TRACK,
    MAX_SLICES_ACROSS_WIDTH,
    describe_slices,
    describe_timeline,
)
from areal_hpc.view.timeline import assign_lanes, iterate_counts_under_way, write_trace
from tests.support.commands import exit_code_of
from tests.support.made_run import MadeEpisode, MadeRun, add_spans

EPISODES = [MadeEpisode(cell=f"cell-{index % 2}", call_s=1.0 + index / 7) for index in range(8)]


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path)
    for _ in range(5):
        made.add_step(EPISODES)
    return made


def lanes_of(timeline: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (process["process"], lane["title"]): lane
        for process in timeline["processes"]
        for lane in process["lanes"]
        if lane["title"]
    }


def test_the_last_steps_are_shown_with_what_limits_them(run: MadeRun) -> None:
    timeline = describe_timeline(run.paths, {})
    assert timeline["shown_steps"] == [3, 4, 5]
    assert [step["step"] for step in timeline["steps"]] == [1, 2, 3, 4, 5]
    assert timeline["answer"]["headline"].startswith("the run is limited by generation")
    assert timeline["step_times"]["shares"]["generation"] > 0.5
    assert timeline["notes"] == ["No spans of this time are recorded."]
    assert len(encode_browser_json(timeline)) < 40_000


def test_spans_are_shown_in_one_time_with_links_to_rows(run: MadeRun) -> None:
    add_spans(run)
    timeline = describe_timeline(run.paths, {"from": str(run.now - 3.5), "to": str(run.now)})
    lanes = lanes_of(timeline)
    (episode,) = lanes["cell-0-driver", "episodes"]["slices"]
    assert timeline["begin"] + episode[0] == pytest.approx(run.now - 2.9, abs=0.05)
    assert timeline["longest"][0]["name"] == "ticket 6 episode 0"
    assert lanes["cell-0-proxy", "calls at replica 0"]["most"] == 1
    states = lanes["trainer-trainer", "states"]["slices"]
    assert [state[2] for state in states] == ["batch_wait", "train"]
    (driver,) = [track for track in timeline["processes"] if track["process"] == "cell-0-driver"]
    assert driver["node"] == "n01"
    assert driver["shares"] == [("episodes", pytest.approx(2 / 3.5, abs=0.01))]


def test_a_notebook_has_spans_as_columns(run: MadeRun) -> None:
    assert areal_hpc.open_run(run.paths.root).spans.n_rows == 0
    add_spans(run)
    spans = areal_hpc.open_run(run.paths.root).spans
    calls = spans["name"] == "call"
    assert set(spans["process"][calls]) == {"cell-0-proxy"}
    assert (spans["end"] - spans["begin"])[calls] == pytest.approx([0.7, 0.8], abs=1e-3)
    assert list(spans["reply_tokens"][calls]) == [7.0, 8.0]


def test_a_run_that_begins_is_shown_before_its_first_step(tmp_path: Path) -> None:
    begins = MadeRun(tmp_path)
    with pytest.raises(RecipeError, match="nothing of this run's time is recorded yet"):
        describe_timeline(begins.paths, {})
    add_spans(begins)
    timeline = describe_timeline(begins.paths, {})
    assert timeline["steps"] == []
    assert timeline["end"] - timeline["begin"] == pytest.approx(12.0, abs=0.1)


@pytest.mark.parametrize("query", [{"from": "x"}, {"from": "nan"}, {"from": "20", "to": "10"}])
def test_times_that_are_none_are_refused(run: MadeRun, query: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match="expected"):
        describe_timeline(run.paths, query)


def test_slices_too_short_for_the_screen_are_drawn_as_one() -> None:
    slices = [Span("call", at / 1000, at / 1000 + 0.0005, facts={"n": at}) for at in range(100_000)]
    slices.append(Span("long", 200.0, 900.0, facts={"n": 1}))
    drawn = describe_slices(slices, 0.0, 1000.0)
    assert len(drawn) < MAX_SLICES_ACROSS_WIDTH
    assert sum(part[3].get("slices", 1) for part in drawn) == 100_001
    assert drawn[-1] == (200.0, 900.0, "long", {"n": 1})
    closer = describe_slices(slices[:100], 0.0, 0.1)
    assert [part[3] for part in closer] == [{"n": at} for at in range(100)]


def test_more_lanes_than_fit_are_counted(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.add_step([MadeEpisode()])
    made.paths.spans_dir.mkdir()
    begin = made.now - 1
    spans = [
        Span("episode", begin, begin + 0.5, "episodes", {"ticket_id": number})
        for number in range(4 * MAX_LANES_PER_TRACK)
    ]
    append_lines(
        made.paths.spans("cell-0-driver"), [ProcessStart(begin - 1, "n01", 3, begin - 1), *spans]
    )
    titles = [title for _, title in lanes_of(describe_timeline(made.paths, {}))]
    assert f"and {3 * MAX_LANES_PER_TRACK} more at once" in titles


SLICED = [
    MadeEpisode(cell=f"cell-{index % 2}", call_s=0.3 + index / 7, tool_s=index / 9)
    for index in range(8)
]


def make_run(root: Path) -> MadeRun:
    run = MadeRun(root)
    for _ in range(4):
        run.add_step(SLICED, {"checkpoint": 0.3})
        seconds = {"transfer": 0.05, "load": 0.02}
        run.add_event("trainer", "weights_published", version=f"1.{run.step}", seconds=seconds)
        run.add_event("cell-1", "process_exited", exit_code=1)
    return run


def list_events(content: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if event["ph"] == kind]


def assert_slices_nest(content: dict[str, Any]) -> None:
    """Assert that a thread's slices lie within or beside one another, as the format demands."""
    by_thread = defaultdict(list)
    for event in list_events(content, "X"):
        assert event["dur"] >= 0
        by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
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
            (part.begin, part.end) for part, its in zip(slices, lanes, strict=True) if its == lane
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
    assert "expected steps such as 10..12 or 10:12, got '5..3'" in capsys.readouterr().err
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
        event["pid"]: event["args"]["name"]
        for event in list_events(content, "M")
        if event["name"] == "process_name"
    }
    assert sorted(names.values()) == [
        *("cell-0-driver (n01)", "cell-0-proxy (n01)", "events", "steps"),
        *("trainer-ledger (n00)", "trainer-trainer (n00)"),
    ]
    (published,) = [one for one in list_events(content, "X") if one["name"] == "weights_published"]
    assert published["dur"] == pytest.approx(70_000, abs=2)
    assert [event["name"] for event in list_events(content, "i")] == ["process_exited"]
    counts = [event["args"]["calls at replica 0"] for event in list_events(content, "C")]
    assert (max(counts), counts[-1]) == (1, 0)
    zero = content["otherData"]["startedAtUnixS"]
    slices = {event["name"]: event for event in list_events(content, "X")}
    episode = slices["ticket 6 episode 0"]
    assert zero + episode["ts"] / 1e6 == pytest.approx(run.now - 2.9, abs=0.05)
    assert episode["args"]["reward"] == 1.0
    assert episode["args"]["row"].startswith("cell-")
    assert slices["batch_wait"]["dur"] == pytest.approx(2e6, abs=1000)
