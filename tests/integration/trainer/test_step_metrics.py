"""Metrics, the entropy term and annotations are those of transformers, in every layout."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_hpc.rundir.checkpoints import RewardRange, find_latest_checkpoint
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import StepAnnotations, read_annotations
from tests.support.float64_trainer import load_float64_model, measure_gradient_norm, score_row
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, record_run
from tests.support.replayed_run import (
    check_layouts_agree,
    read_recorded_rows,
    train_copy,
    train_run,
)

NAMES = (
    "loss",
    "entropy/mean",
    "logprob/engine_trainer_max_abs_diff",
    "logprob/engine_trainer_mean_abs_diff",
    "logprob/engine_trainer_p99_abs_diff",
    "logprob/engine_trainer_kl",
    "logprob/compared_tokens",
    "reward/std",
    "groups/zero_variance",
)
LAYOUTS: list[dict[str, int]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}]


EVERY_STEP: dict[str, Any] = {"steps": 3, "minibatches": 1}


@pytest.fixture(scope="module")
def last_is_best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record three batches, the last with the best rewards of the run."""
    return record_run(tmp_path_factory.mktemp("recorded"), 3, rewards={3: [1.375] * 4}).root


def test_metrics_do_not_depend_on_the_layout(
    ranks: RankServer, last_is_best: Path, tmp_path: Path
) -> None:
    check_layouts_agree(
        ranks, last_is_best, tmp_path, {}, NAMES, layouts=LAYOUTS, rel=1e-3, **EVERY_STEP
    )


def test_a_traced_step_trains_to_the_same_bits_and_leaves_a_trace_of_the_chosen_rank(
    ranks: RankServer, last_is_best: Path, tmp_path: Path
) -> None:
    plain, traced = (
        RunPaths(shutil.copytree(last_is_best, tmp_path / name)) for name in ("plain", "traced")
    )
    profile = {"profile": {"steps": [2], "ranks": [1]}}
    settings: dict[str, Any] = {"objective": {}, "parallel": {"dp": 2}, "steps": 2}
    reports = [
        train_run(ranks, paths, more=more, **settings).reports[0]["digests"]
        for paths, more in ((plain, {}), (traced, profile))
    ]
    assert reports[0] == reports[1]
    (trace,) = traced.list_profiles()
    assert trace == traced.profile(2, "trainer-1.trace.json.gz")
    names = {event.get("name", "") for event in read_trace(trace)}
    assert any(name.startswith("aten::") for name in names)
    assert any(name.endswith(": train_batch") for name in names)


def read_trace(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def test_the_last_groups_are_the_best_of_the_run_and_updates_count_each_token_once(
    ranks: RankServer, last_is_best: Path, tmp_path: Path
) -> None:
    alone = train_copy(ranks, last_is_best, tmp_path / "alone", {}, **EVERY_STEP)
    checkpoint = find_latest_checkpoint(RunPaths(tmp_path / "alone").checkpoints_dir)
    assert checkpoint is not None
    assert checkpoint.state.reward_range == RewardRange(0.0, 1.375)
    assert [line["groups/all_best"] for line in alone] == [0.0, 0.0, 1.0]
    assert alone[2]["groups/zero_variance"] == 1.0
    settings = {"steps": 3, "minibatches": 3}
    first, *_ = train_copy(ranks, last_is_best, tmp_path / "parts", {}, **settings)
    for name in ("logprob/compared_tokens", "logprob/engine_trainer_mean_abs_diff"):
        assert first[name] == pytest.approx(alone[0][name], rel=1e-3)
    assert first["entropy/mean"] == pytest.approx(alone[0]["entropy/mean"], rel=0.02)
    assert 0 < first["entropy/mean"] < 5.78, "at most that of 320 equal tokens"


COEF = 0.3
OBJECTIVE = {"entropy_coef": COEF}


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a batch whose rewards teach nothing, and one like others."""
    rewards = {1: [1.0] * SAMPLES}
    return record_run(tmp_path_factory.mktemp("equal"), 2, rewards=rewards).root


def test_the_entropy_term_alone_has_the_gradient_of_transformers_in_float64(
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


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record two batches, of which the second teaches nothing."""
    rewards = {1: [0.0, 1.0] * (SAMPLES // 2), 2: [1.0] * SAMPLES}
    return record_run(tmp_path_factory.mktemp("annotated"), 2, rewards=rewards).root


def annotate(
    ranks: RankServer, recorded: Path, folder: Path, annotate: str, **parallel: int
) -> tuple[RunPaths, dict[str, Any]]:
    paths = RunPaths(shutil.copytree(recorded, folder))
    outcome = train_run(ranks, paths, {}, parallel, steps=2, more={"annotate": annotate})
    assert set(outcome.codes) == {0}, outcome.log
    return paths, outcome.reports[0]


def get_annotations(paths: RunPaths, step: int = 1) -> StepAnnotations:
    annotations = read_annotations(paths, step)
    assert annotations is not None
    return annotations


def test_annotations_are_what_transformers_finds_with_the_weights_that_the_step_began_with(
    ranks: RankServer, sampled: Path, tmp_path: Path
) -> None:
    paths, report = annotate(ranks, sampled, tmp_path / "all", "all", dp=1)
    step_1 = get_annotations(paths)
    rows, model = read_recorded_rows(paths), load_float64_model(paths.starting_model_dir)
    model.requires_grad_(False)
    assert len(step_1.rows) == len(rows) == step_1.rows_of_batch
    for annotation, row in zip(step_1.rows, rows, strict=True):
        logprobs, entropies = (values_T.numpy() for values_T in score_row(model, row))
        assert np.frombuffer(annotation.logprobs, "<f4") == pytest.approx(logprobs, abs=1e-4)
        if annotation.row % 2 == 0:  # the first half is scored by the initial weights
            assert np.frombuffer(annotation.entropies, "<f2") == pytest.approx(entropies, rel=2e-3)
    assert {row.outcome for row in step_1.rows} == {"trained"}
    assert [np.sign(row.advantage) for row in step_1.rows[:2]] == [-1, 1]
    assert {row.outcome for row in get_annotations(paths, 2).rows} == {"no advantage"}
    ratios = [np.frombuffer(row.ratios, "<f2") for row in step_1.rows]
    assert ratios[0] == pytest.approx(1.0, abs=1e-3)
    assert max(np.abs(ratio - 1).max() for ratio in ratios[1::2]) > 1e-3, "of the second minibatch"
    plain, other = annotate(ranks, sampled, tmp_path / "off", "off", dp=1)
    assert not plain.annotations_dir.exists()
    assert other["digests"] == report["digests"], "training has not seen them, to the bit"
