"""Annotations of tokens: what transformers finds, in every layout; training does not see them."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import StepAnnotations, read_annotations
from areal_hpc.wire.trajectory import TrajectoryRow
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, record_run
from tests.support.replayed_run import LAYOUTS_OF_TWO, read_recorded_rows


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches, of which the second teaches nothing."""
    rewards = {1: [0.0, 1.0] * (SAMPLES // 2), 2: [1.0] * SAMPLES}
    return record_run(tmp_path_factory.mktemp("annotated"), 2, rewards=rewards).root


def replay(
    ranks: RankServer, recorded: Path, folder: Path, annotate: str, **parallel: int
) -> tuple[RunPaths, dict[str, Any]]:
    paths = RunPaths(shutil.copytree(recorded, folder))
    settings = {"total_steps": 2, "parallel": parallel, "minibatches": 2, "annotate": annotate}
    outcome = ranks.run(paths, "replay", math.prod(parallel.values()), trainer=settings)
    assert set(outcome.codes) == {0}, outcome.log
    return paths, outcome.reports[0]


def get_annotations(paths: RunPaths, step: int = 1) -> StepAnnotations:
    found = read_annotations(paths, step)
    assert found is not None
    return found


def score_with_transformers(paths: RunPaths, row: TrajectoryRow) -> tuple[Any, Any]:
    """Log-probabilities and entropies at the row's sampled tokens, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        paths.starting_model_dir, dtype=torch.float64
    )
    ids = torch.from_numpy(row.input_ids_T).long()
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(ids[None]).logits[0, :-1] / row.temperature, -1)
    own_T = logprobs_TV.gather(-1, ids[1:, None])[:, 0]
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    is_sampled = torch.from_numpy(row.loss_mask_T[1:] == 1)
    return own_T[is_sampled].numpy(), entropy_T[is_sampled].numpy()


def test_they_are_what_transformers_finds_with_the_weights_that_the_step_began_with(
    ranks: RankServer, sampled: Path, tmp_path: Path
) -> None:
    paths, report = replay(ranks, sampled, tmp_path / "all", "all", dp=1)
    found = get_annotations(paths)
    rows = read_recorded_rows(paths)
    assert len(found.rows) == len(rows) == found.rows_of_batch
    for annotation, row in zip(found.rows, rows, strict=True):
        logprobs, entropies = score_with_transformers(paths, row)
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


@pytest.mark.thorough
def test_layouts_agree(ranks: RankServer, sampled: Path, tmp_path: Path) -> None:
    expected = get_annotations(replay(ranks, sampled, tmp_path / "1", "sampled", dp=1)[0])
    for parallel in LAYOUTS_OF_TWO:
        name = next(iter(parallel))
        found = get_annotations(replay(ranks, sampled, tmp_path / name, "sampled", **parallel)[0])
        assert len(found.rows) == len(expected.rows)
        for own, one in zip(found.rows, expected.rows, strict=True):
            assert (own.shard, own.row, own.outcome, own.reasons) == (
                *(one.shard, one.row, one.outcome, one.reasons),
            )
            for field, kind, bound in (
                *(("logprobs", "<f4", 1e-4), ("ratios", "<f2", 2e-3)),
                *(("entropies", "<f2", 8e-3), ("advantages", "<f2", 1e-3)),
            ):
                values = np.frombuffer(getattr(own, field), kind).astype(float)
                wanted = np.frombuffer(getattr(one, field), kind).astype(float)
                assert values == pytest.approx(wanted, abs=bound)
