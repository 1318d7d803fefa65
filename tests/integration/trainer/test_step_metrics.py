"""Metrics of a step are those of the batch, however the trainer's ranks divide it."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.manifests import list_manifest_steps, read_manifest
from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer
from tests.support.recorded_run import record_run
from tests.support.replay_worker import Scenario, make_learner

NAMES = (
    "loss",
    "entropy/mean",
    "logprob/engine_trainer_max_abs_diff",
    "logprob/engine_trainer_mean_abs_diff",
    "logprob/engine_trainer_p99_abs_diff",
    "logprob/engine_trainer_kl",
    "logprob/compared_tokens",
    "reward/std",
    "groups/zero_variance",
)
LAYOUTS: list[dict[str, int]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}]


def train_each_batch(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    """Train on every batch; its metrics, and the range of rewards that the state keeps."""
    learner = make_learner(scenario, paths)
    lines = [learner.train_batch(read_manifest(paths, step)) for step in list_manifest_steps(paths)]
    seen = learner.state.reward_range
    assert seen is not None
    return {"lines": lines, "range": [seen.lowest, seen.highest]}


def train(ranks: RankServer, recorded: RunPaths, **trainer: Any) -> dict[str, Any]:
    """What rank 0 finds in a copy of the run: another start's weights have another name."""
    with tempfile.TemporaryDirectory() as folder:
        copy = RunPaths(Path(shutil.copytree(recorded.root, Path(folder) / "run")))
        return train_in(ranks, copy, **trainer)


def train_in(ranks: RankServer, paths: RunPaths, **trainer: Any) -> dict[str, Any]:
    parallel: dict[str, int] = trainer.get("parallel", {})
    count = next(iter(parallel.values()), 1)
    outcome = ranks.call(train_each_batch, paths, count, trainer=trainer)
    assert outcome.codes == [0] * count, outcome.log
    return outcome.reports[0]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Three batches; in the last all rewards are the best ones of the run."""
    return record_run(tmp_path_factory.mktemp("recorded"), 3, rewards={3: [1.375] * 4})


@pytest.fixture(scope="module")
def alone(ranks: RankServer, paths: RunPaths) -> dict[str, Any]:
    return train(ranks, paths)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_metrics_do_not_depend_on_the_layout(
    ranks: RankServer, paths: RunPaths, alone: dict[str, Any], parallel: dict[str, int]
) -> None:
    found = train(ranks, paths, parallel=parallel)
    for line, expected in zip(found["lines"], alone["lines"], strict=True):
        for name in NAMES:
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


def test_the_last_groups_are_the_best_of_the_run(alone: dict[str, Any]) -> None:
    assert alone["range"] == [0.0, 1.375]
    assert [line["groups/all_best"] for line in alone["lines"]] == [0.0, 0.0, 1.0]
    assert alone["lines"][2]["groups/zero_variance"] == 1.0


def test_several_updates_count_each_token_once(
    ranks: RankServer, paths: RunPaths, alone: dict[str, Any]
) -> None:
    found = train(ranks, paths, minibatches=3)
    first, expected = found["lines"][0], alone["lines"][0]
    for name in ("logprob/compared_tokens", "logprob/engine_trainer_mean_abs_diff"):
        assert first[name] == pytest.approx(expected[name], rel=1e-3)
    assert first["entropy/mean"] == pytest.approx(expected["entropy/mean"], rel=0.02)
    assert 0 < first["entropy/mean"] < 5.78, "at most that of 320 equal tokens"
