"""A resume takes everything but the settings from the checkpoint, on all ranks alike."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import AgentError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer import collectives
from areal_hpc.trainer.checkpoints import store
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.collectives import is_true_on_any_rank
from areal_hpc.trainer.learner import Learner
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
def test_the_step_after_a_resume_needs_all_that_was_kept(
    scenario: Scenario, paths: RunPaths
) -> None:
    learner = begin_training(scenario, paths)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    take_step(learner, paths, 3)
    expected = state_of(learner)

    def is_exact_without(name: str | None) -> bool:
        """Whether the third step is, after a resume that loses one thing of every parameter."""
        resumed = make_learner(scenario, paths)
        # Every parameter needs a counter of its own: AdamW counts it up in place.
        assert len({id(moments["step"]) for moments in moments_of(resumed)}) > 10
        for moments in moments_of(resumed):
            if name is not None:
                moments[name].zero_()
        take_step(resumed, paths, 3)
        return state_of(resumed) == expected

    assert is_exact_without(None)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert not is_exact_without(name)


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
    assert {float(moments["step"]) for moments in moments_of(resumed)} == {1.0}
    for group in settings_of(resumed):
        assert (list(group["betas"]), group["eps"]) == ([0.8, 0.9], 1e-6)
        assert group["weight_decay"] == pytest.approx(0.3 * group["wd_mult"])


@pytest.mark.on_ranks(2)
def test_all_ranks_resume_from_what_rank_0_chose(scenario: Scenario, paths: RunPaths) -> None:
    begin_training(scenario, paths).checkpoints.close()
    dist.barrier()
    if dist.get_rank() == 1:
        mock.patch.object(store, "find_latest_checkpoint", None).start()
    assert make_learner(scenario, paths).state.step == 1


def look_for_a_checkpoint(scenario: Scenario, paths: RunPaths) -> None:
    """Rank 1 looks elsewhere."""
    begin_training(scenario, paths).checkpoints.close()
    collectives.FILE_VISIBLE_TIMEOUT_S = 0.5
    is_blind = dist.get_rank() == 1
    directory = paths.root / "elsewhere" if is_blind else paths.checkpoints_dir
    CheckpointStore(directory, keep=2).broadcast_latest_checkpoint()


def test_a_rank_without_the_checkpoint_says_so(ranks: RankServer, paths: RunPaths) -> None:
    outcome = ranks.call(look_for_a_checkpoint, paths, 2, trainer=TWO_RANKS)
    assert outcome.codes == [STOPPED, STORAGE_FAILED]
    assert "this rank cannot see" in outcome.reports[1]["error"]


def fail_alone(scenario: Scenario, paths: RunPaths) -> None:
    """The other ranks wait in a collective, and none is still joining the groups."""
    is_true_on_any_rank(False)
    if dist.get_rank() == scenario["failing"]:
        raise AgentError("agents do nothing but fail")
    is_true_on_any_rank(False)


@pytest.mark.parametrize("failing", [0, 1])
def test_only_the_failed_rank_reports(ranks: RankServer, paths: RunPaths, failing: int) -> None:
    outcome = ranks.call(fail_alone, paths, 2, trainer=TWO_RANKS, failing=failing)
    assert outcome.codes[failing] == AGENTS_FAILED
    assert outcome.codes[1 - failing] == STOPPED, outcome.log
    assert outcome.reports[1 - failing] == {}
