"""The entropy term: its gradient where nothing else has one, and in every layout."""

import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, record_run
from tests.support.replayed_run import LAYOUTS_OF_TWO, read_recorded_rows

COEF = 0.3


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch whose rewards teach nothing, and one like others."""
    rewards = {1: [1.0] * SAMPLES}
    return record_run(tmp_path_factory.mktemp("equal"), 2, rewards=rewards).root


def measure(
    ranks: RankServer, recorded: Path, folder: Path, coef: float, **parallel: int
) -> list[dict[str, float]]:
    paths = RunPaths(shutil.copytree(recorded, folder))
    size = math.prod(parallel.values())
    settings = {"total_steps": 2, "parallel": parallel, "objective": {"entropy_coef": coef}}
    outcome = ranks.run(paths, "replay", size, trainer=settings)
    assert set(outcome.codes) == {0}, outcome.log
    return read_readable_records(paths.metrics)


def differentiate_with_transformers(paths: RunPaths) -> tuple[float, float]:
    """The mean entropy of the first batch in float64, and the norm of its gradient."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        paths.starting_model_dir, dtype=torch.float64
    )
    # transformers gives the embedding of a padding token no gradient; here it is like others.
    model.get_input_embeddings().padding_idx = None
    entropies = []
    for row in read_recorded_rows(paths):
        ids = torch.from_numpy(row.input_ids_T).long()
        logprobs_TV = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        entropies.append(entropy_T[torch.from_numpy(row.loss_mask_T[1:] != 0)])
    mean = torch.cat(entropies).mean()
    mean.backward()
    squares = [(one.grad**2).sum() for one in model.parameters() if one.grad is not None]
    return mean.item(), torch.stack(squares).sum().sqrt().item()


def test_alone_it_has_the_gradient_of_transformers_in_float64(
    ranks: RankServer, equal: Path, tmp_path: Path
) -> None:
    mean, norm = differentiate_with_transformers(RunPaths(equal))
    first, second = measure(ranks, equal, tmp_path / "with", COEF)
    assert first["entropy/mean"] == pytest.approx(mean, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(COEF * norm, rel=1e-5)
    assert first["loss"] == pytest.approx(-COEF * mean, rel=1e-5)
    assert first["step/skipped"] == 0, "it is a signal, though all rewards are equal"
    plain, after = measure(ranks, equal, tmp_path / "without", 0.0)
    assert (plain["grad_norm"], plain["step/skipped"]) == (0, 1)
    assert second["entropy/mean"] > after["entropy/mean"]


@pytest.mark.thorough
def test_layouts_agree(ranks: RankServer, equal: Path, tmp_path: Path) -> None:
    expected = measure(ranks, equal, tmp_path / "1", COEF)
    for number, parallel in enumerate(LAYOUTS_OF_TWO):
        found = measure(ranks, equal, tmp_path / f"2-{number}", COEF, **parallel)
        for line, other in zip(found, expected, strict=True):
            for name in ("loss", "grad_norm", "entropy/mean"):
                assert line[name] == pytest.approx(other[name], rel=2e-5), (parallel, name)
