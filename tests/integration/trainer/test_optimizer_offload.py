"""An optimizer in host memory: runs end with the same bits, and resume one from the other.

One kernel that steps all, as on GPUs, and torch's default resume from each other too.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.optimizer import switch_adamw_to_fused_kernel
from tests.integration.trainer.conftest import STEPS
from tests.support.rank_server import RankServer, TaskExit
from tests.support.replay_worker import (
    Scenario,
    make_learner,
    moments_of,
    state_of,
    take_step,
)
from tests.support.replayed_run import train_run
from tests.support.thoroughness import choose

OFFLOADED = {"offload": {"optimizer": True}}
SETTINGS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "parallel": {"dp": 2}},
    {"parallel": {"tp": 2}},
]


def train(
    ranks: RankServer, source: Path, folder: Path, settings: dict[str, Any], **scenario: Any
) -> TaskExit:
    paths = RunPaths(shutil.copytree(source, folder))
    parallel = settings.get("parallel", {})
    return train_run(ranks, paths, {}, parallel, steps=STEPS, more=settings, **scenario)


def digests_of(outcome: TaskExit) -> list[dict[str, str]]:
    assert set(outcome.codes) == {0}, outcome.log
    return [report["digests"] for report in outcome.reports]


@pytest.mark.parametrize(
    "settings",
    choose(SETTINGS, SETTINGS[1]),
    ids=str,
)
def test_a_run_ends_with_the_same_bits(
    ranks: RankServer, recorded: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    expected = digests_of(train(ranks, recorded, tmp_path / "plain", settings))
    assert any("main" in name for name in expected[0])
    found = train(ranks, recorded, tmp_path / "offloaded", settings | OFFLOADED)
    assert digests_of(found) == expected


def test_checkpoints_are_interchangeable(ranks: RankServer, recorded: Path, tmp_path: Path) -> None:
    plain = {"dtype": "bfloat16"}
    expected = digests_of(train(ranks, recorded, tmp_path / "whole", plain))
    ways: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("to", plain, plain | OFFLOADED),
        ("from", plain | OFFLOADED, plain),
        ("again", plain | OFFLOADED, plain | OFFLOADED),
    ]
    for name, first, then in choose(ways, *ways[:2]):
        fault = "train.before_step@5=kill"
        assert train(ranks, recorded, tmp_path / name, first, faults=fault).codes == [-9]
        resumed = train(ranks, tmp_path / name, tmp_path / f"{name}-resumed", then)
        assert digests_of(resumed) == expected, name
        assert resumed.reports[0]["began_at"] > 0


@pytest.mark.parametrize("scenario", [{"dtype": "bfloat16"}], indirect=True)
@pytest.mark.on_ranks(2)
def test_a_fused_step_is_that_of_many_kernels_and_its_checkpoint_is_read_by_both(
    scenario: Scenario, paths: RunPaths
) -> None:
    plain, fused = make_learner(scenario, paths), make_learner(scenario, paths)
    switch_adamw_to_fused_kernel(fused._optimizer, torch.device("cpu"))
    for learner in (plain, fused):
        take_step(learner, paths, 1)
    for expected, found in zip(moments_of(plain), moments_of(fused), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-9)
    fused.begin_checkpoint({})
    fused.checkpoints.finish_save()
    resumed = make_learner(scenario, paths)
    assert resumed.state.step == 1
    assert state_of(resumed) == state_of(fused)
