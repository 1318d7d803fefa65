"""Gradients reduced over ranks while the backward pass goes on: bucket by bucket, the same bits."""

from typing import Any

import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import ActivationMemoryConfig, ParallelConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.model import policy as policy_module
from areal_hpc.trainer.model.policy import TrainedNetwork
from tests.integration.trainer.test_recompute import DENSE, MIXTURE, build, compute_gradients
from tests.support.replay_worker import Scenario, begin_training, make_learner, state_of, take_step

SMALL_BUCKET = 2_000


def list_bucket_groups(policy: TrainedNetwork) -> list[Any]:
    return [*policy.ddp_module.bucket_groups, *policy.ddp_module.expert_parallel_bucket_groups]


def note_begun_reductions(policy: TrainedNetwork) -> list[int]:
    """How many buckets are on their way at the end of each backward pass, from now on."""
    begun: list[int] = []
    finish = policy.ddp_module.finish_grad_sync

    def note(**options: Any) -> None:
        handles = [group.grad_reduce_handle for group in list_bucket_groups(policy)]
        begun.append(sum(handle is not None for handle in handles))
        finish(**options)

    policy.ddp_module.finish_grad_sync = note
    return begun


def check_buckets(parallel: ParallelConfig) -> None:
    for arch in (DENSE, MIXTURE):
        own = parallel if arch.experts else parallel.model_copy(update={"ep": 1})
        whole = build(arch, own, ActivationMemoryConfig())
        expected = compute_gradients(whole)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy_module, "GRADIENT_BUCKET_ELEMENTS", SMALL_BUCKET)
            policy = build(arch, own, ActivationMemoryConfig())
        count = len(list_bucket_groups(policy))
        assert count > len(list_bucket_groups(whole)) + 2
        begun = note_begun_reductions(policy)
        for _ in range(2):
            policy.ddp_module.zero_grad_buffer()
            found = compute_gradients(policy)
            different = [name for name in expected if not torch.equal(found[name], expected[name])]
            assert different == [], arch.family
        # Of the first pass Megatron learns when each bucket is done.
        assert begun == [0, count]


@pytest.mark.parametrize("scenario", [{"parallel": {"dp": 2, "ep": 2}}], indirect=True)
@pytest.mark.on_ranks(2)
def test_buckets_are_reduced_during_the_last_backward_pass(
    scenario: Scenario, paths: RunPaths
) -> None:
    check_buckets(ParallelConfig.model_validate(scenario["trainer"]["parallel"]))


@pytest.mark.on_ranks(2)
def test_a_checkpoint_of_many_buckets_is_resumed_to_the_same_bits(
    scenario: Scenario, paths: RunPaths
) -> None:
    policy_module.GRADIENT_BUCKET_ELEMENTS = SMALL_BUCKET
    learner = begin_training(scenario, paths)
    assert len(list_bucket_groups(learner.policy)) > 1
    resumed = make_learner(scenario, paths)
    assert resumed.state.step == 1
    take_step(resumed, paths, 2)
    assert state_of(resumed) == state_of(learner)
