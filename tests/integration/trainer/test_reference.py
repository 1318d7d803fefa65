"""Frozen models, a reference and a teacher: what they score, in every layout, and over kills."""

from pathlib import Path
from typing import Any

import pytest
import torch

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.float64_trainer import load_float64_model, measure_gradient_norm, score_row
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, VOCAB, record_run
from tests.support.replayed_run import (
    check_killed_run_ends_alike,
    read_recorded_rows,
    train_copy,
    train_run,
)

IN_REWARD: dict[str, Any] = {
    "kl": {"coef": 0.2},
    "baseline": "leave_one_out",
    "scale_rewards": "none",
}
IN_LOSS: dict[str, Any] = {"kl": {"coef": 0.2, "placement": "loss", "estimator": "k2"}}
PLAIN = {"off_policy_correction": "none", "surrogate": "none"}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of another size, of the same tokens."""
    folder = tmp_path_factory.mktemp("other") / "model"
    make_tiny_model(
        folder, ["one two three"], hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, layers=4,
        vocab=VOCAB, seed=7,
    )  # fmt: skip
    return folder


def test_the_divergence_is_that_of_transformers(
    ranks: RankServer, stale: Path, other_model: Path, tmp_path: Path
) -> None:
    objective = {"kl": {"coef": 0.2, "reference": str(other_model)}}
    (first, *_) = train_copy(ranks, stale, tmp_path / "run", objective, minibatches=1)
    own, other = map(load_float64_model, (RunPaths(stale).starting_model_dir, other_model))
    rows = read_recorded_rows(RunPaths(stale))
    gaps = [(score_row(own, row)[0] - score_row(other, row)[0]).detach() for row in rows]
    assert first["kl/reference"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-4)


def test_a_teacher_gives_the_gradient_of_transformers_in_float64(
    ranks: RankServer, other_model: Path, tmp_path: Path
) -> None:
    """Rewards are all equal: nothing else is learned from."""
    paths = record_run(tmp_path / "equal", 1, rewards={1: [1.0] * SAMPLES})
    own, teacher = map(load_float64_model, (paths.starting_model_dir, other_model))
    gaps, terms = [], []
    for row in read_recorded_rows(paths):
        (mine, _), (other, _) = (score_row(model, row) for model in (own, teacher))
        gaps.append((other - mine).detach())
        terms.append(0.5 * gaps[-1] * mine)
    torch.cat(terms).mean().backward()
    objective = {"teacher": {"coef": 0.5, "path": str(other_model)}, **PLAIN}
    outcome = train_run(ranks, paths, objective, steps=1, minibatches=1)
    assert outcome.codes == [0], outcome.log
    (line,) = read_readable_records(paths.metrics)
    assert line["kl/teacher"] == pytest.approx(-torch.cat(gaps).mean().item(), rel=1e-4)
    assert line["grad_norm"] == pytest.approx(measure_gradient_norm(own), rel=1e-5)


def test_at_first_the_policy_is_its_own_reference(
    ranks: RankServer, stale: Path, tmp_path: Path
) -> None:
    plain = train_copy(ranks, stale, tmp_path / "plain", {**IN_REWARD, "kl": {}}, minibatches=1)
    for name, objective in (("reward", IN_REWARD), ("loss", IN_LOSS)):
        lines = train_copy(ranks, stale, tmp_path / name, objective, minibatches=1)
        assert lines[0]["kl/reference"] == 0.0
        assert all(line["kl/reference"] != 0.0 for line in lines[1:])
        assert "time/score_s" in lines[0]
    rewarded = read_readable_records(RunPaths(tmp_path / "reward").metrics)
    assert rewarded[0]["grad_norm"] == plain[0]["grad_norm"], "to the bit: nothing was taken off"
    assert rewarded[2]["grad_norm"] != plain[2]["grad_norm"]
    assert "kl/reference" not in plain[0]


def test_an_adapter_that_is_off_is_the_reference_that_it_began_as(
    ranks: RankServer, stale: Path, tmp_path: Path
) -> None:
    more = {"lora": {"rank": 2, "dropout": 0.2}}
    lines = train_copy(ranks, stale, tmp_path / "off", IN_LOSS, minibatches=1, more=more)
    loaded = {"kl": {**IN_LOSS["kl"], "reference": str(RunPaths(stale).starting_model_dir)}}
    others = train_copy(ranks, stale, tmp_path / "loaded", loaded, minibatches=1, more=more)
    assert lines[-1]["kl/reference"] != 0.0
    for line, other in zip(lines, others, strict=True):
        assert line["kl/reference"] == pytest.approx(other["kl/reference"], rel=1e-3, abs=1e-6)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.thorough
def test_a_killed_run_ends_with_the_same_bits(
    ranks: RankServer, stale: Path, tmp_path: Path
) -> None:
    alone, killed, _ = check_killed_run_ends_alike(
        ranks, stale, tmp_path, "optimizer.before_step@9", IN_LOSS, {}
    )
    lines, others = (read_readable_records(paths.metrics) for paths in (killed, alone))
    assert [line["kl/reference"] for line in lines] == [line["kl/reference"] for line in others]
