"""Megatron 0.16 spoils AdamW's state on loading in three ways; each of our mends is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer
from tests.support.recorded_run import record_run


def step_after_a_resume(ranks: RankServer, root: Path, without: str) -> dict[str, Any]:
    paths: RunPaths = record_run(root, 3)
    name = "tests.integration.trainer.checkpoint_inspections:adamw_fault"
    trainer = {"total_steps": 3}
    outcome = ranks.run(paths, "inspect", trainer=trainer, inspect=name, without=without)
    assert outcome.codes == [0], outcome.log
    return outcome.reports[0]


def test_with_every_mend_the_step_after_a_resume_is_exact(
    ranks: RankServer, tmp_path: Path
) -> None:
    found = step_after_a_resume(ranks, tmp_path, without="none")
    assert found["is_exact"]
    assert found["step_tensors"] > 10


def test_moments_must_exist_before_they_are_loaded(ranks: RankServer, tmp_path: Path) -> None:
    found = step_after_a_resume(ranks, tmp_path, without="primed moments")
    assert found["raised"] in ("AssertionError", "KeyError")


def test_the_step_count_must_be_handed_to_the_loader(ranks: RankServer, tmp_path: Path) -> None:
    assert step_after_a_resume(ranks, tmp_path, without="step count") == {"raised": "KeyError"}


def test_every_parameter_needs_a_step_tensor_of_its_own(ranks: RankServer, tmp_path: Path) -> None:
    found = step_after_a_resume(ranks, tmp_path, without="step tensors")
    assert found == {"step_tensors": 1, "is_exact": False}
