"""The entropy term: its gradient where nothing else has one, and in every layout."""

from pathlib import Path

import pytest
import torch

from areal_hpc.rundir.paths import RunPaths
from tests.support.float64_trainer import load_float64_model, measure_gradient_norm, score_row
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, record_run
from tests.support.replayed_run import read_recorded_rows, train_copy

COEF = 0.3
OBJECTIVE = {"entropy_coef": COEF}


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch whose rewards teach nothing, and one like others."""
    rewards = {1: [1.0] * SAMPLES}
    return record_run(tmp_path_factory.mktemp("equal"), 2, rewards=rewards).root


def test_alone_it_has_the_gradient_of_transformers_in_float64(
    ranks: RankServer, equal: Path, tmp_path: Path
) -> None:
    model = load_float64_model(RunPaths(equal).starting_model_dir)
    entropies = [score_row(model, row)[1] for row in read_recorded_rows(RunPaths(equal))]
    mean = torch.cat(entropies).mean()
    mean.backward()
    norm = measure_gradient_norm(model)
    settings = {"steps": 2, "minibatches": 1}
    first, second = train_copy(ranks, equal, tmp_path / "with", OBJECTIVE, **settings)
    assert first["entropy/mean"] == pytest.approx(mean.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(COEF * norm, rel=1e-5)
    assert first["loss"] == pytest.approx(-COEF * mean.item(), rel=1e-5)
    assert first["step/skipped"] == 0, "it is a signal, though all rewards are equal"
    plain, after = train_copy(ranks, equal, tmp_path / "without", {}, **settings)
    assert (plain["grad_norm"], plain["step/skipped"]) == (0, 1)
    assert second["entropy/mean"] > after["entropy/mean"]
