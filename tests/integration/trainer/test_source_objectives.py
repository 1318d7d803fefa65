"""Sources of tasks with objectives of their own: gradients add up, and a run trains with them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import TrainSources
from areal_hpc.trainer.batch.packing import (
    Channel,
    count_policy_tokens,
    count_scored_tokens,
)
from areal_hpc.trainer.batch.sources import SourceObjectives
from areal_hpc.trainer.batch.training_rows import NO_SCORES
from areal_hpc.trainer.objective.policy_loss import compute_minibatch_factors
from areal_hpc.trainer.step import PolicyTrainer, make_micro_batches_of_this_rank, run_passes
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.layout_worker import exported_gradients
from tests.support.replay_worker import Scenario
from tests.support.sample_episodes import MadeUpTurn, build_batch
from tests.support.small_policy import load_policy

SUMS = {"surrogate": "none", "loss_agg": "seq_mean_token_sum", "baseline": "leave_one_out"}
PAIRS: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({}, {"surrogate": "none", "scale_rewards": "group_mean"}, "tokens"),
    (SUMS, {**SUMS, "scale_rewards": "none", "entropy_coef": 0.1}, "episodes"),
    ({}, {"observation_coef": 0.5}, "tokens"),
)
"""Objectives of two sources, and the shares by which their losses add up."""


def make_batch() -> list[TrajectoryRow]:
    """Make two groups of a source with short episodes and one of a source with long ones."""
    short = [[MadeUpTurn(9, 1.0)], [MadeUpTurn(9, 0.0, tokens=3)], [MadeUpTurn(9, 0.5, tokens=1)]]
    long = [[MadeUpTurn(9, 0.0), MadeUpTurn(0, reward, tokens=4)] for reward in (0.2, 0.0, 1.0)]
    rows = build_batch([short, long, short[::-1]], ExportSettings())
    return [
        replace(row, record=msgspec.structs.replace(row.record, task_index=5 * row.ticket_id % 10))
        for row in rows
    ]


def compute_gradient(
    model_dir: Path, batch: Sequence[TrajectoryRow], objectives: Sequence[ObjectiveConfig]
) -> torch.Tensor:
    """Compute the gradient of a batch with tasks of two sources, one of which may be absent."""
    policy = load_policy(model_dir, torch.device("cpu"))
    sources = SourceObjectives(TrainSources(("short", "long"), (5, 5)), objectives)
    rows = sources.build_rows(batch, WeightVersion(1, 0), [GenerationFork(1, 0)], NO_SCORES)
    (factor,) = compute_minibatch_factors([count_scored_tokens(rows)], [count_policy_tokens(rows)])
    config = TrainerConfig(objective=objectives[0])
    ignore: Any = lambda *_: None  # noqa: E731
    trainer = PolicyTrainer(config, policy, ignore, None, ignore, sources.distinct)
    batches = make_micro_batches_of_this_rank(policy, rows, list(Channel), max_tokens=20)
    loss = partial(trainer._compute_loss, minibatch_index=0, updates_done_share=0.0, factor=factor)
    run_passes(policy, batches, loss, backward=True)
    return torch.cat([tensor.flatten() for tensor in exported_gradients(policy).values()]).double()


def test_objectives_that_differ_in_the_name_of_their_preset_are_one() -> None:
    objectives = [ObjectiveConfig(), ObjectiveConfig(preset="dapo"), ObjectiveConfig(clip_low=0.1)]
    sources = SourceObjectives(TrainSources(("a", "b", "c"), (1, 1, 1)), objectives)
    assert [objective.clip_low for objective in sources.distinct] == [0.2, 0.1]


@pytest.mark.on_ranks(1)
def test_the_gradient_is_the_weighted_sum_of_the_sources_alone(
    scenario: Scenario, paths: RunPaths
) -> None:
    batch = make_batch()
    parts = [[row for row in batch if (row.record.task_index >= 5) is is_long]
             for is_long in (False, True)]  # fmt: skip
    for *keys, unit in PAIRS:
        objectives = [ObjectiveConfig.model_validate(own) for own in keys]
        both = compute_gradient(paths.starting_model_dir, batch, objectives)
        alone = [compute_gradient(paths.starting_model_dir, part, [objective])
                 for part, objective in zip(parts, objectives, strict=True)]  # fmt: skip
        sizes = [
            len(part) if unit == "episodes" else sum(int(row.loss_mask_T.sum()) for row in part)
            for part in parts
        ]
        shares = [size / sum(sizes) for size in sizes]
        difference = both - sum(share * own for share, own in zip(shares, alone, strict=True))
        assert float(difference.norm() / both.norm()) <= 1e-6, (keys, float(both.norm()))
