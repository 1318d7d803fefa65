"""Causes of slow runs, in runs with one fault each; the sample runs of docs/diagnosing.md."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.recipe.reference import list_keys
from areal_hpc.rundir.paths import RunPaths, list_runs
from areal_hpc.shards.verify import verify_run
from areal_hpc.view.answers.collapse import diagnose_collapse
from areal_hpc.view.answers.slow_run import explain_slow_run, measure_mean_step_parts
from areal_hpc.view.answers.step_change import explain_step_difference
from areal_hpc.view.audit import audit_run
from areal_hpc.view.batch_episodes import read_batch_episodes, sum_batch_waits
from areal_hpc.view.formatting import format_answer
from areal_hpc.view.transcripts.row_filter import FIELD_NAMES_FOR_HELP, compile_filter
from tests.support.environments import CHECKOUT, PACKAGE
from tests.support.made_run import MadeEpisode, MadeRun
from tests.support.run_files import unpack_archive

STEPS = 4
PLAIN = [MadeEpisode(cell=f"cell-{number % 2}") for number in range(16)]


def make_run(root: Path, episodes: list[MadeEpisode], **step: Any) -> MadeRun:
    run = MadeRun(root)
    for _ in range(STEPS):
        run.add_step(episodes, **step)
        for cell in ("cell-0", "cell-1"):
            run.add_event(cell, "replica_resumed", replica=0, busy_s=0.1)
    return run


SLOW_CELL = [replace(one, call_s=4.0) if one.cell == "cell-1" else one for one in PLAIN]
SLOW_TOOL = [replace(one, tool_s=9.0) for one in PLAIN]
SLOW_STORAGE = "the run directory's storage is slow"
LONG_EPISODE = [*PLAIN[:-1], replace(PLAIN[-1], calls=12)]


@pytest.mark.parametrize(
    ("episodes", "step", "limit", "cause"),
    [
        (PLAIN, {}, "generation", ""),
        (SLOW_CELL, {}, "generation", "replica 0 of cell-1 (node n02) is slow"),
        (SLOW_TOOL, {}, "tools", "the tool search takes 9.00 s on average"),
        (LONG_EPISODE, {}, "generation", "episode 3 of ticket 3, step 1 on cell-1 (node n02)"),
        (PLAIN, {"phases": {"checkpoint": 9.0}}, "checkpoints", "writing of checkpoints"),
        (PLAIN, {"phases": {"read": 9.0}}, "reading batches", SLOW_STORAGE),
        (PLAIN, {"phases": {"files": 9.0}}, "small files", SLOW_STORAGE),
        (PLAIN, {"phases": {"eval": 9.0}}, "evaluation", "evaluation.every_steps=1"),
        (PLAIN, {"phases": {"score": 9.0}}, "training", ""),
        (PLAIN, {"sealing_s": 9.0}, "sealing", SLOW_STORAGE),
        (PLAIN[:2], {}, "generation", "1.0 calls at once at each replica are few"),
        (
            PLAIN,
            {"late_s": 9.0, "cells__idle_s": 18.0},
            "admission",
            "the bounds are rollout.max_concurrent_rollouts=8 and rollout.max_head_offpolicyness=0",
        ),
    ],
)
def test_the_headline_names_the_limit_and_who_is_to_blame(
    tmp_path: Path, episodes: list[MadeEpisode], step: dict[str, Any], limit: str, cause: str
) -> None:
    answer = explain_slow_run(make_run(tmp_path, episodes, **step).paths)
    limited, _, blamed = answer.headline.partition("; ")
    assert limited.startswith(f"the run is limited by {limit}: ")
    assert cause in blamed
    assert bool(blamed) is bool(cause)


def test_a_slow_receiver_of_weights_is_named_with_its_node(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    for _ in range(STEPS):
        run.add_step(PLAIN, {"publish": 9.0}, weights__load_s=8.0, weights__transfer_s=0.5)
        # Both are stopped as long: they take each step of an update together.
        run.add_event("cell-0", "replica_resumed", replica=0, pause_s=8.6, busy_s=0.2)
        run.add_event("cell-1", "replica_resumed", replica=0, pause_s=8.6, busy_s=8.5)
    answer = explain_slow_run(run.paths)
    assert "limited by weight updates: 9.0 s of the 11.6 s of a step" in answer.headline
    assert "replica 0 of cell-1 (node n02) takes 8.50 s for an update" in answer.headline
    text = "\n".join(format_answer(answer, "RUN"))
    assert "the longest part is weights/load_s, 8.00 s" in text
    assert [line.split() for line in answer.table[1:]] == [
        ["cell-0", "0", "n01", "40", "0.20"],
        ["cell-1", "0", "n02", "40", "8.50"],
    ]


def test_a_wait_is_split_by_what_episodes_do_meanwhile(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    pair = [MadeEpisode(tool_s=2.0), MadeEpisode(calls=1, cell="cell-1")]
    run.add_step(pair, late_s=1.0, sealing_s=0.5)
    waits = sum_batch_waits(
        read_metrics(run.paths.metrics), read_batch_episodes(run.paths, [1], [])
    )
    assert waits == pytest.approx(
        {
            "sealing": 0.5,  # after the last had ended
            "admission": 1.0,  # before they began
            "generation": 2.0,
            "tools": 2.0,
            "last episodes": 3.0,  # one of two is left
            "calls": 3.0,
            "any call": 2.0,  # the first call of each at the same time
        }
    )


def test_a_wait_begins_when_the_row_before_is_written(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.add_step(PLAIN, {"files": 9.0}, sealing_s=3.0)
    rows = read_metrics(run.paths.metrics)
    waits = sum_batch_waits(rows, read_batch_episodes(run.paths, [1], []))
    parts = measure_mean_step_parts(rows, waits)
    assert parts["small files"] == 9.0
    assert parts["sealing"] == pytest.approx(3.0)
    assert "admission" not in parts


def test_what_cannot_be_read_is_said_and_the_rest_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, PLAIN)
    next(run.paths.shards_dir.iterdir()).write_bytes(b"no shard")
    answer = explain_slow_run(run.paths)
    assert answer.headline.startswith("the run is limited by generation")
    assert sum(finding.text.startswith("not read: ") for finding in answer.findings) == 1


def test_filters_of_pages_are_those_of_the_dashboard(tmp_path: Path) -> None:
    run = make_run(tmp_path, SLOW_CELL)
    answers = [
        explain_slow_run(run.paths),
        explain_step_difference(run.paths, STEPS),
        explain_slow_run(make_run(tmp_path / "tool", SLOW_TOOL).paths),
    ]
    pages = [finding.page for answer in answers for finding in answer.findings if finding.page]
    queries = [parse_qs(page.partition("?")[2]) for page in pages]
    wheres = [query["where"][0] for query in queries if "where" in query]
    assert 'cell="cell-1"' in wheres
    for where in wheres:
        compile_filter(where)
    sorts = {query["sort"][0] for query in queries if "sort" in query}
    assert sorts <= {*FIELD_NAMES_FOR_HELP}
    assert {page.partition("?")[0] for page in pages} <= {
        *("#/overview", "#/metrics", "#/trajectories", "#/trajectory")
    }
    assert {query["run"][0] for query in queries} == {"made/run"}


def test_keys_of_recipes_that_answers_name_exist() -> None:
    sources = [path.read_text() for path in (PACKAGE / "view" / "answers").glob("*.py")]
    pattern = r"(?<![.\w])(?:rollout|trainer|evaluation|inference|cluster)\.[a-z_.]*[a-z]"
    named = {key for text in sources for key in re.findall(pattern, text)}
    assert {"rollout.max_head_offpolicyness", "trainer.objective.clip_high"} <= named
    assert named <= {*list_keys()}


def test_parts_that_wait_for_storage_are_told_together(tmp_path: Path) -> None:
    run = make_run(tmp_path, PLAIN, phases={"checkpoint": 0.4, "read": 0.4}, sealing_s=0.4)
    texts = [finding.text for finding in explain_slow_run(run.paths).findings]
    (together,) = [text for text in texts if "wait for the run directory's storage" in text]
    assert "together 1.20 s a step (31%)" in together


ARCHIVE, SWITCH_STEP = CHECKOUT / "examples" / "sample_runs.tar.xz", 30
WALK = (CHECKOUT / "docs" / "diagnosing.md").read_text()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    unpack_archive(ARCHIVE, folder)
    return folder / "sample_runs"


def test_the_headlines_are_those_of_the_walk(samples: Path) -> None:
    answers = (
        explain_slow_run(RunPaths(samples / "slow")),
        explain_step_difference(RunPaths(samples / "drop"), SWITCH_STEP),
        diagnose_collapse(RunPaths(samples / "collapse")),
    )
    words = " ".join(WALK.split())
    assert [answer.headline for answer in answers if answer.headline not in words] == []


def test_no_run_shows_the_fault_of_another(samples: Path) -> None:
    for name in ("slow", "drop"):
        assert diagnose_collapse(RunPaths(samples / name)).is_well
    for name in ("drop", "collapse"):
        assert "is slow" not in explain_slow_run(RunPaths(samples / name)).headline


def test_samples_are_small_whole_runs(samples: Path) -> None:
    assert ARCHIVE.stat().st_size < 3 << 20
    runs = list_runs(samples)
    assert [paths.run_name for paths in runs] == [
        *("sample_runs/collapse", "sample_runs/drop", "sample_runs/slow")
    ]
    for paths in runs:
        assert audit_run(paths).summary_line == "trained_once=160 duplicates=0 lost=0 open=0"
        assert not verify_run(paths).problems
