"""Critic, reference and teacher keep their scores in every layout and over kills."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import read_annotations
from tests.support.float64_trainer import load_float64_model, measure_gradient_norm, score_row
from tests.support.loss_reference import sum_discounted_errors
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, VOCAB, record_run
from tests.support.replayed_run import (
    LAYOUTS_OF_TWO,
    check_killed_run_ends_alike,
    check_layouts_agree,
    read_recorded_rows,
    train_copy,
    train_run,
)
from tests.support.thoroughness import choose

COMPARED = (
    "loss", "grad_norm", "advantage/abs_max", "critic/loss", "critic/grad_norm",
    "critic/mean_value", "critic/explained_variance",
)  # fmt: skip
MAX_CLIP_FRACTION_GAP = 0.01
"""Rounding may decide one or two of some 150 tokens near the bound."""
CRITIC: dict[str, Any] = {"model": "initial", "lr": 1e-2}
VALUE: dict[str, Any] = {"baseline": "value", "scale_rewards": "batch", "critic": CRITIC}


@pytest.fixture(scope="module")
def scorer(stale: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a reward model as transformers does: the policy's body with a head of one output."""
    folder = tmp_path_factory.mktemp("scorer") / "model"
    shutil.copytree(RunPaths(stale).starting_model_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(3)
    tensors["score.weight"] = torch.randn(1, hidden, generator=generator) * 0.1
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_critic_says_and_learns_what_transformers_does_in_float64(
    ranks: RankServer, stale: Path, scorer: Path, tmp_path: Path
) -> None:
    objective = {**VALUE, "critic": {**CRITIC, "model": str(scorer), "clip_value": None}}
    (first,) = train_copy(ranks, stale, tmp_path / "run", objective, minibatches=1, steps=1)
    body = transformers.AutoModel.from_pretrained(scorer, dtype=torch.float64)
    body.get_input_embeddings().padding_idx = None
    head = load_file(scorer / "model.safetensors")["score.weight"].double().requires_grad_()
    values, returns = [], []
    for row in read_recorded_rows(RunPaths(stale)):
        assert len(row.record.calls) <= 1 or not row.record.calls, "a row is an episode here"
        ids = torch.from_numpy(row.input_ids_T).long()
        states = body(ids[None]).last_hidden_state[0]
        own = (states[:-1] @ head[0])[torch.from_numpy(row.loss_mask_T[1:] != 0)]
        (advantages,) = sum_discounted_errors([(own.tolist(), float(row.reward))], 1.0, 0.95)
        values.append(own)
        returns.append(torch.from_numpy(advantages) + own.detach())
    predicted, aims = torch.cat(values), torch.cat(returns)
    loss = ((predicted - aims) ** 2 / 2).mean()
    loss.backward()
    rest = (aims - predicted.detach()).var(unbiased=False) / aims.var(unbiased=False)
    assert first["critic/mean_value"] == pytest.approx(predicted.mean().item(), rel=1e-4)
    assert first["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["critic/explained_variance"] == pytest.approx(1 - rest.item(), rel=1e-4, abs=1e-6)
    assert head.grad is not None
    norm = math.hypot(measure_gradient_norm(body), head.grad.norm().item())
    assert first["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_critic_without_a_head_in_its_directory_begins_at_zero_and_learns(
    ranks: RankServer, stale: Path, tmp_path: Path
) -> None:
    lines = train_copy(ranks, stale, tmp_path / "run", VALUE)
    assert lines[0]["critic/mean_value"] == 0.0
    assert all(line["critic/mean_value"] != 0.0 for line in lines[1:])
    assert all(line["critic/lr"] == pytest.approx(10 * line["lr"]) for line in lines)
    assert "time/score_s" in lines[0]


@pytest.mark.parametrize("unit", choose(["token", "turn"], "token"))
def test_critics_of_layouts_agree(
    ranks: RankServer, stale: Path, scorer: Path, tmp_path: Path, unit: str
) -> None:
    objective = {**VALUE, "gae_unit": unit, "critic": {**CRITIC, "model": str(scorer)}}
    layouts = LAYOUTS_OF_TWO if unit == "token" else LAYOUTS_OF_TWO[:1]
    pairs = check_layouts_agree(
        ranks, stale, tmp_path, objective, COMPARED, layouts=layouts, rel=5e-5, abs=2e-6, steps=2
    )
    for line, other in pairs:
        gap = abs(line["critic/clip_fraction"] - other["critic/clip_fraction"])
        assert gap <= MAX_CLIP_FRACTION_GAP, line["step"]


THRIFTY: dict[str, Any] = {
    "dtype": "bfloat16", "recompute": "full", "offload": {"optimizer": True, "activations": True},
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parallel", "more"),
    choose([({}, {}), ({"dp": 2}, {}), ({}, THRIFTY)], ({"dp": 2}, {})),
    ids=str,
)
def test_a_killed_run_with_a_critic_ends_with_the_same_bits(
    ranks: RankServer,
    stale: Path,
    tmp_path: Path,
    parallel: dict[str, int],
    more: dict[str, Any],
) -> None:
    fault = "train.before_step@5"
    *_, reports = check_killed_run_ends_alike(
        ranks, stale, tmp_path, fault, VALUE, parallel, more=more
    )
    assert all(any(name.startswith("critic.") for name in report["digests"]) for report in reports)


def test_while_the_critic_warms_up_the_policy_stays_as_it_is(
    ranks: RankServer, stale: Path, tmp_path: Path
) -> None:
    objective = {**VALUE, "critic": {**CRITIC, "warmup_steps": 2}}
    reports = {}
    for steps in (1, 2, 3):
        paths = RunPaths(shutil.copytree(stale, tmp_path / str(steps)))
        outcome = train_run(ranks, paths, objective, steps=steps)
        assert outcome.codes == [0], outcome.log
        reports[steps] = outcome.reports[0]["digests"]
    lines = read_readable_records(RunPaths(tmp_path / "3").metrics)
    assert [line["grad_norm"] > 0 for line in lines] == [False, False, True]
    assert [line["step/skipped"] for line in lines] == [0, 0, 0], "nothing was due"
    annotated = [read_annotations(RunPaths(tmp_path / "3"), step) for step in (1, 2, 3)]
    outcomes = [{row.outcome for row in step.rows} - {"no advantage"} for step in annotated if step]
    warmed_up = {"the critic warmed up: the policy was not trained"}
    assert outcomes[:2] == [warmed_up, warmed_up]
    assert "trained" in outcomes[2]
    assert all(line["critic/grad_norm"] > 0 for line in lines)
    own = {name for name in reports[1] if not name.startswith("critic.")}
    assert all(reports[1][name] == reports[2][name] for name in own)
    assert any(reports[2][name] != reports[3][name] for name in own)
    assert any(reports[1][name] != reports[2][name] for name in reports[1].keys() - own)


IN_REWARD: dict[str, Any] = {
    "kl": {"coef": 0.2},
    "baseline": "leave_one_out",
    "scale_rewards": "none",
}
IN_LOSS: dict[str, Any] = {"kl": {"coef": 0.2, "placement": "loss", "estimator": "k2"}}
PLAIN = {"off_policy_correction": "none", "surrogate": "none"}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a network of another size, of the same tokens."""
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
    """Rewards are all equal, so the teacher alone gives a gradient."""
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
def test_a_killed_run_with_a_reference_ends_with_the_same_bits(
    ranks: RankServer, stale: Path, tmp_path: Path
) -> None:
    alone, killed, _ = check_killed_run_ends_alike(
        ranks, stale, tmp_path, "optimizer.before_step@9", IN_LOSS, {}
    )
    lines, others = (read_readable_records(paths.metrics) for paths in (killed, alone))
    assert [line["kl/reference"] for line in lines] == [line["kl/reference"] for line in others]
