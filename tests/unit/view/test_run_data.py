"""A run opened for a notebook: what its columns hold, and the example of the documentation."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import areal_hpc
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.manifests import EvaluationResult, write_evaluation
from areal_hpc.view.state.run_data import Columns
from tests.support.counted_reads import counted_reads
from tests.support.environments import CHECKOUT
from tests.support.made_run import MadeEpisode, MadeRun
from tests.support.sample_trajectories import seal_in, trajectory


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    """Two steps of two groups each; the second group of each earns the same."""
    run = MadeRun(tmp_path)
    for _ in range(2):
        differing = [MadeEpisode(reward=reward, reply=(7, 8)) for reward in (0.0, 1.0, 1.0, 0.0)]
        run.add_step([*differing, *[MadeEpisode(reward=0.5, calls=3)] * 4])
    valid = EvaluationResult(2, 2, 0.5, [0.0, 1.0], {}, 1)
    samples = [[1.0, 0.0], [0.0, 0.0]]
    aime = EvaluationResult(2, 2, 0.25, [0.5, 0.0], {}, 1, samples, [["4", "5"], ["", ""]])
    write_evaluation(run.paths, "aime", aime)
    write_evaluation(run.paths, "valid", valid)
    return run


def test_columns_hold_what_was_recorded(made: MadeRun) -> None:
    run = areal_hpc.open_run(made.paths.root)
    assert run.recipe["trainer"]["batch_size"] == 2
    assert run.metrics["step"].tolist() == [1, 2]
    rows = run.trajectories
    assert (rows.n_rows, set(rows["kind"])) == (16, {"train"})
    assert rows["step"].tolist() == [1] * 8 + [2] * 8
    assert rows["length"].tolist() == ([2] * 4 + [3] * 4) * 2
    assert rows["calls"].dtype == np.float64
    assert run.groups["reward_std"].tolist() == [0.5, 0.0] * 2
    assert run.groups["episodes"].tolist() == [4] * 4
    assert run.calls.n_rows == 2 * (4 * 2 + 4 * 3)
    assert np.allclose(run.calls["answered_at"] - run.calls["asked_at"], 1.0)


def test_columns_read_a_shard_as_a_whole_and_not_row_by_row(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    seal_in(run.paths, [trajectory(ticket, 0) for ticket in range(100)])
    made = areal_hpc.open_run(run.paths.root)
    with counted_reads() as reads:
        assert (made.trajectories.n_rows, made.calls.n_rows) == (100, 0)
    assert len(reads) < 50


def test_a_column_takes_values_of_any_shape() -> None:
    columns = Columns([{"ranks": [0, 1]}, {"ranks": [2, 3]}])
    assert columns["ranks"].tolist() == [[0, 1], [2, 3]]


def test_an_episode_of_several_rows_counts_as_their_mean(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    rewards = {0: (1.0, 0.0), 1: (0.0, 1.0), 2: (0.5, 0.5)}
    rows = [
        replace(trajectory(7, episode, reward=reward), row=row)
        for episode, of_rows in rewards.items()
        for row, reward in enumerate(of_rows)
    ]
    seal_in(run.paths, rows)
    groups = areal_hpc.open_run(run.paths.root).groups
    assert groups["episodes"].tolist() == [3]
    assert groups["reward_mean"].tolist() == [0.5]
    assert groups["reward_std"].tolist() == [0.0]


def test_evaluations_have_a_row_per_sample(made: MadeRun) -> None:
    found = areal_hpc.open_run(made.paths.root).evaluations
    assert found["set"].tolist() == ["valid"] * 2 + ["aime"] * 4
    assert found["reward"].tolist() == [0, 1, 1, 0, 0, 0]
    assert found["sample"].tolist() == [0, 0, 0, 1, 0, 1]
    assert found["answer"].tolist() == ["", "", "4", "5", "", ""]


def test_a_run_without_anything_has_empty_columns_with_their_names(tmp_path: Path) -> None:
    run = areal_hpc.open_run(MadeRun(tmp_path).paths.root)
    assert {one.n_rows for one in (run.trajectories, run.calls, run.groups, run.evaluations)} == {0}
    assert run.evaluations["reward"].tolist() == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not the directory of a run"):
        areal_hpc.open_run(tmp_path)


def test_the_example_of_the_documentation_runs(made: MadeRun) -> None:
    text = (CHECKOUT / "docs" / "notebooks.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "~/runs/quickstart/demo" in block
    names: dict[str, object] = {}
    exec(block.replace("~/runs/quickstart/demo", str(made.paths.root)), names)
    assert names["last_step"] == 2
    assert names["taught_nothing"] == 0.5
    assert names["surprise"] == pytest.approx(0.5)
    assert names["mean_length"] == 2.5
