"""The timeline as its page shows it: lanes as fine as a screen, shares of time, longest slices."""

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
from tests.support.made_run import MadeEpisode, MadeRun, add_spans

EPISODES = [MadeEpisode(cell=f"cell-{place % 2}", call_s=1.0 + place / 7) for place in range(8)]


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path)
    for _ in range(5):
        made.add_step(EPISODES)
    return made


def lanes_of(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (one["process"], lane["title"]): lane
        for one in found["processes"]
        for lane in one["lanes"]
        if lane["title"]
    }


def test_the_last_steps_are_shown_with_what_limits_them(run: MadeRun) -> None:
    found = describe_timeline(run.paths, {})
    assert found["shown_steps"] == [3, 4, 5]
    assert [one["step"] for one in found["steps"]] == [1, 2, 3, 4, 5]
    assert found["answer"]["headline"].startswith("the run is limited by generation")
    assert found["step_times"]["shares"]["generation"] > 0.5
    assert found["notes"] == ["No spans of this time are recorded."]
    assert len(encode_browser_json(found)) < 40_000


def test_spans_are_shown_in_one_time_with_links_to_rows(run: MadeRun) -> None:
    add_spans(run)
    found = describe_timeline(run.paths, {"from": str(run.now - 3.5), "to": str(run.now)})
    lanes = lanes_of(found)
    (episode,) = lanes["cell-0-driver", "episodes"]["slices"]
    assert found["begin"] + episode[0] == pytest.approx(run.now - 2.9, abs=0.05)
    assert found["longest"][0]["name"] == "ticket 6 episode 0"
    assert lanes["cell-0-proxy", "calls at replica 0"]["most"] == 1
    states = lanes["trainer-trainer", "states"]["slices"]
    assert [one[2] for one in states] == ["batch_wait", "train"]
    (driver,) = [one for one in found["processes"] if one["process"] == "cell-0-driver"]
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
    found = describe_timeline(begins.paths, {})
    assert found["steps"] == []
    assert found["end"] - found["begin"] == pytest.approx(12.0, abs=0.1)


@pytest.mark.parametrize("query", [{"from": "x"}, {"from": "nan"}, {"from": "20", "to": "10"}])
def test_times_that_are_none_are_refused(run: MadeRun, query: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match="expected"):
        describe_timeline(run.paths, query)


def test_slices_too_short_for_the_screen_are_drawn_as_one() -> None:
    slices = [Span("call", at / 1000, at / 1000 + 0.0005, facts={"n": at}) for at in range(100_000)]
    slices.append(Span("long", 200.0, 900.0, facts={"n": 1}))
    found = describe_slices(slices, 0.0, 1000.0)
    assert len(found) < MAX_SLICES_ACROSS_WIDTH
    assert sum(one[3].get("slices", 1) for one in found) == 100_001
    assert found[-1] == (200.0, 900.0, "long", {"n": 1})
    closer = describe_slices(slices[:100], 0.0, 0.1)
    assert [one[3] for one in closer] == [{"n": at} for at in range(100)]


def test_more_lanes_than_fit_are_counted(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.add_step([MadeEpisode()])
    made.paths.spans_dir.mkdir()
    begin = made.now - 1
    spans = [
        Span("episode", begin, begin + 0.5, "episodes", {"ticket_id": place})
        for place in range(4 * MAX_LANES_PER_TRACK)
    ]
    append_lines(
        made.paths.spans("cell-0-driver"), [ProcessStart(begin - 1, "n01", 3, begin - 1), *spans]
    )
    titles = [title for _, title in lanes_of(describe_timeline(made.paths, {}))]
    assert f"and {3 * MAX_LANES_PER_TRACK} more at once" in titles
