"""Annotations of tokens: what transformers finds, in every layout; training does not see them."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import StepAnnotations, read_annotations
from tests.support.float64_trainer import load_float64_model, score_row
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, record_run
from tests.support.replayed_run import read_recorded_rows, train_run


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches, of which the second teaches nothing."""
    rewards = {1: [0.0, 1.0] * (SAMPLES // 2), 2: [1.0] * SAMPLES}
    return record_run(tmp_path_factory.mktemp("annotated"), 2, rewards=rewards).root


def replay(
    ranks: RankServer, recorded: Path, folder: Path, annotate: str, **parallel: int
) -> tuple[RunPaths, dict[str, Any]]:
    paths = RunPaths(shutil.copytree(recorded, folder))
    outcome = train_run(ranks, paths, {}, parallel, steps=2, more={"annotate": annotate})
    assert set(outcome.codes) == {0}, outcome.log
    return paths, outcome.reports[0]


def get_annotations(paths: RunPaths, step: int = 1) -> StepAnnotations:
    found = read_annotations(paths, step)
    assert found is not None
    return found


def test_they_are_what_transformers_finds_with_the_weights_that_the_step_began_with(
    ranks: RankServer, sampled: Path, tmp_path: Path
) -> None:
    paths, report = replay(ranks, sampled, tmp_path / "all", "all", dp=1)
    found = get_annotations(paths)
    rows, model = read_recorded_rows(paths), load_float64_model(paths.starting_model_dir)
    model.requires_grad_(False)
    assert len(found.rows) == len(rows) == found.rows_of_batch
    for annotation, row in zip(found.rows, rows, strict=True):
        logprobs, entropies = (one.numpy() for one in score_row(model, row))
        assert np.frombuffer(annotation.logprobs, "<f4") == pytest.approx(logprobs, abs=1e-4)
        if annotation.row % 2 == 0:  # the first half is scored by the weights of the begin
            assert np.frombuffer(annotation.entropies, "<f2") == pytest.approx(entropies, rel=2e-3)
    assert {one.outcome for one in found.rows} == {"trained"}
    assert [np.sign(one.advantage) for one in found.rows[:2]] == [-1, 1]
    assert {one.outcome for one in get_annotations(paths, 2).rows} == {"no advantage"}
    ratios = [np.frombuffer(one.ratios, "<f2") for one in found.rows]
    assert ratios[0] == pytest.approx(1.0, abs=1e-3)
    assert max(np.abs(one - 1).max() for one in ratios[1::2]) > 1e-3, "of the second minibatch"
    plain, other = replay(ranks, sampled, tmp_path / "off", "off", dp=1)
    assert not plain.annotations_dir.exists()
    assert other["digests"] == report["digests"], "training has not seen them, to the bit"
