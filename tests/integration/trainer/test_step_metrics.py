"""Metrics of a step are those of the batch, however the trainer's ranks divide it."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.checkpoints import RewardRange, find_latest_checkpoint
from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer
from tests.support.recorded_run import record_run
from tests.support.replayed_run import check_layouts_agree, train_copy

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


EVERY_STEP: dict[str, Any] = {"steps": 3, "minibatches": 1}


@pytest.fixture(scope="module")
def last_is_best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three batches; in the last all rewards are the best ones of the run."""
    return record_run(tmp_path_factory.mktemp("recorded"), 3, rewards={3: [1.375] * 4}).root


def test_metrics_do_not_depend_on_the_layout(
    ranks: RankServer, last_is_best: Path, tmp_path: Path
) -> None:
    check_layouts_agree(
        ranks, last_is_best, tmp_path, {}, NAMES, layouts=LAYOUTS, rel=1e-3, **EVERY_STEP
    )


def test_the_last_groups_are_the_best_of_the_run_and_updates_count_each_token_once(
    ranks: RankServer, last_is_best: Path, tmp_path: Path
) -> None:
    alone = train_copy(ranks, last_is_best, tmp_path / "alone", {}, **EVERY_STEP)
    checkpoint = find_latest_checkpoint(RunPaths(tmp_path / "alone").checkpoints_dir)
    assert checkpoint is not None
    assert checkpoint.state.reward_range == RewardRange(0.0, 1.375)
    assert [line["groups/all_best"] for line in alone] == [0.0, 0.0, 1.0]
    assert alone[2]["groups/zero_variance"] == 1.0
    settings = {"steps": 3, "minibatches": 3}
    first, *_ = train_copy(ranks, last_is_best, tmp_path / "parts", {}, **settings)
    for name in ("logprob/compared_tokens", "logprob/engine_trainer_mean_abs_diff"):
        assert first[name] == pytest.approx(alone[0][name], rel=1e-3)
    assert first["entropy/mean"] == pytest.approx(alone[0]["entropy/mean"], rel=0.02)
    assert 0 < first["entropy/mean"] < 5.78, "at most that of 320 equal tokens"
