"""A resume takes everything but the settings from the checkpoint, on all ranks alike."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split
from areal_hpc.errors import AgentError
from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer import collectives, megatron_private
from areal_hpc.trainer.checkpoints import megatron_format, store
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.collectives import any_true
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.optimizer import apply_optimizer_settings
from tests.support.rank_server import RankServer
from tests.support.replay_worker import (
    Scenario,
    begin_training,
    make_learner,
    moments_of,
    state_of,
    take_step,
)

STOPPED, STORAGE_FAILED, DATA_DAMAGED, AGENTS_FAILED = 143, 75, 65, 70
TWO_RANKS = {"total_steps": 1, "parallel": {"dp": 2}}


@pytest.mark.on_ranks(1)
def test_the_step_after_a_resume_needs_every_mend(scenario: Scenario, paths: RunPaths) -> None:
    """Megatron 0.16 spoils AdamW's state on loading in three ways."""
    learner = begin_training(scenario, paths)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    take_step(learner, paths, 3)

    def take_step_after_resume() -> tuple[int, bool]:
        """How many tensors count steps, and whether the step is exact."""
        resumed = make_learner(scenario, paths)
        counters = {id(moments["step"]) for moments in moments_of(resumed)}
        take_step(resumed, paths, 3)
        return len(counters), state_of(resumed) == state_of(learner)

    load_sharded = megatron_format.load_sharded

    def load_unprimed(policy: Any, optimizer: Any, directory: Path) -> None:
        for part in optimizer.chained_optimizers:
            part.optimizer.state.clear()
        load_sharded(policy, optimizer, directory)

    counters, is_exact = take_step_after_resume()
    assert is_exact
    assert counters > 10
    # Moments must exist before they are loaded.
    with (
        mock.patch.object(megatron_format, "load_sharded", load_unprimed),
        pytest.raises((AssertionError, KeyError)),
    ):
        make_learner(scenario, paths)
    # The step count must be handed to the loader.
    with (
        mock.patch.object(megatron_private, "_wrap_load_with_step", lambda part, load: load),
        pytest.raises(KeyError),
    ):
        make_learner(scenario, paths)
    # Every parameter needs a counter of its own.
    with mock.patch.object(megatron_private, "_unshare_steps"):
        assert take_step_after_resume() == (1, False)


def settings_of(learner: Learner) -> list[dict[str, Any]]:
    """AdamW's settings of every group of parameters."""
    return [
        {name: group[name] for name in ("betas", "eps", "weight_decay", "wd_mult")}
        for part in learner._optimizer.chained_optimizers
        for group in part.optimizer.param_groups
    ]


@pytest.mark.on_ranks(1)
def test_a_resume_takes_the_recipes_optimizer_settings(scenario: Scenario, paths: RunPaths) -> None:
    begin_training(scenario, paths)
    new = {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}
    scenario["trainer"]["optimizer"] = new
    resumed = make_learner(scenario, paths)
    with mock.patch.object(store, "apply_optimizer_settings"):
        without = make_learner(scenario, paths)
    for learner in (resumed, without):
        assert {float(moments["step"]) for moments in moments_of(learner)} == {1.0}
    # Left alone, the optimizer would go on with those of the checkpoint.
    assert {tuple(group["betas"]) for group in settings_of(without)} == {(0.9, 0.95)}
    apply_optimizer_settings(without._optimizer, AdamConfig.model_validate(new))
    assert settings_of(resumed) == settings_of(without)
    for group in settings_of(resumed):
        assert (list(group["betas"]), group["eps"]) == ([0.8, 0.9], 1e-6)
        assert group["weight_decay"] == pytest.approx(0.3 * group["wd_mult"])


@pytest.mark.on_ranks(2)
def test_all_ranks_resume_from_what_rank_0_chose(scenario: Scenario, paths: RunPaths) -> None:
    begin_training(scenario, paths).checkpoints.close()
    dist.barrier()
    if dist.get_rank() == 1:
        mock.patch.object(store, "find_latest", None).start()
    assert make_learner(scenario, paths).state.step == 1


@pytest.mark.on_ranks(2)
def test_nan_on_one_rank_is_nan_in_the_maximum(scenario: Scenario, paths: RunPaths) -> None:
    rank = dist.get_rank()
    own = {"odd": [5.0, float("nan")][rank], "huge": [float("inf"), 1.0][rank], "plain": rank + 1.0}
    maxima = LossStats({}, own).reduce_over_ranks((), tuple(own)).maxima
    assert {name: str(value) for name, value in maxima.items()} == {
        "odd": "nan", "huge": "inf", "plain": "2.0",
    }  # fmt: skip


def look_for_a_checkpoint(scenario: Scenario, paths: RunPaths) -> None:
    """Rank 1 looks elsewhere."""
    begin_training(scenario, paths).checkpoints.close()
    collectives.FILE_VISIBLE_TIMEOUT_S = 0.5
    is_blind = dist.get_rank() == 1
    directory = paths.root / "elsewhere" if is_blind else paths.checkpoints_dir
    CheckpointStore(directory, keep=2).find_latest_on_all_ranks()


def test_a_rank_without_the_checkpoint_says_so(ranks: RankServer, paths: RunPaths) -> None:
    outcome = ranks.call(look_for_a_checkpoint, paths, 2, trainer=TWO_RANKS)
    assert outcome.codes == [STOPPED, STORAGE_FAILED]
    assert "this rank cannot see" in outcome.reports[1]["error"]


def train_impatiently(scenario: Scenario, paths: RunPaths) -> None:
    collectives.FILE_VISIBLE_TIMEOUT_S = 0.5
    take_step(make_learner(scenario, paths), paths, 1)


def test_the_rank_that_cannot_read_a_shard_says_so(ranks: RankServer, paths: RunPaths) -> None:
    faults = {"faulty_rank": 1, "faults": "shard.before_read=error"}
    outcome = ranks.call(train_impatiently, paths, 2, trainer=TWO_RANKS, **faults)
    assert outcome.codes == [STOPPED, STORAGE_FAILED]
    assert outcome.reports[0] == {}
    assert outcome.reports[1]["kind"] == "ClusterError"
    assert "other ranks can read it" in outcome.reports[1]["error"]
    assert "a fault at shard.before_read" in outcome.reports[1]["error"]


def fail_alone(scenario: Scenario, paths: RunPaths) -> None:
    """The other ranks wait in a collective."""
    if dist.get_rank() == scenario["failing"]:
        raise AgentError("agents do nothing but fail")
    any_true(False)


@pytest.mark.parametrize("failing", [0, 1])
def test_only_the_failed_rank_reports(ranks: RankServer, paths: RunPaths, failing: int) -> None:
    outcome = ranks.call(fail_alone, paths, 2, trainer=TWO_RANKS, failing=failing)
    assert outcome.codes[failing] == AGENTS_FAILED
    assert outcome.codes[1 - failing] == STOPPED, outcome.log
    assert outcome.reports[1 - failing] == {}
