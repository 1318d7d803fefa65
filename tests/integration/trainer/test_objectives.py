"""Objectives of stale batches compute as transformers in float64 does, alike in every layout."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_hpc.recipe.presets import PRESETS
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.manifests import write_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import SamplingMask, TrajectoryRow
from tests.support.float64_trainer import (
    Float64Trainer,
    compute_advantages,
    load_float64_model,
    measure_gradient_norm,
    score_row,
)
from tests.support.rank_server import RankServer
from tests.support.recorded_run import TRAINER, VOCAB, record_run
from tests.support.replayed_run import (
    check_layouts_agree,
    copy_for_mixture,
    read_recorded_rows,
    train_copy,
    train_run,
)
from tests.support.sample_episodes import MadeUpTurn, build_batch
from tests.support.thoroughness import choose

STEPS = 3
COMPARED = (
    "loss", "grad_norm", "importance_weight/mean", "importance_weight/max", "kl/behavior",
    "importance_weight/out_of_bounds_fraction",
    "importance_weight/effective_sample_fraction", "ratio/clip_fraction",
)  # fmt: skip


def pack(max_tokens: int) -> dict[str, Any]:
    return {"more": {"max_tokens_per_microbatch": max_tokens}}


SEQUENCE_OBJECTIVES: tuple[dict[str, Any], ...] = (
    {
        "ratio_level": "sequence", "clip_low": 1e-5, "clip_high": 1e-5,
        "loss_agg": "seq_mean_token_mean", "baseline": "leave_one_out", "scale_rewards": "batch",
    },
    {
        "surrogate": "cispo", "ratio_level": "sequence", "clip_low": 1e-3, "clip_high": 1e-3,
        "loss_agg": "seq_mean_token_sum_norm", "loss_scale_tokens": 9,
    },
    {
        "custom": "examples.objectives.m2po:compute_terms", "proximal": "none",
        "off_policy_correction": "none", "loss_agg": "seq_mean_token_sum",
    },
    {
        "proximal": "log_linear", "off_policy_correction": "mask",
        "off_policy_correction_level": "sequence",
        "off_policy_correction_low": 0.76, "off_policy_correction_high": 1.1,
    },
    {
        "off_policy_correction": "mask", "off_policy_correction_level": "sequence",
        "off_policy_correction_metric": "k1", "off_policy_correction_agg": "max",
        "off_policy_correction_high": 0.8,
    },
)  # fmt: skip
"""Ratios of rows, through whose mean the gradient flows in the first; sums over episodes; a custom
loss that leaves tokens out by a property of their row; rows that are judged as a unit, by ages of
tokens and by their largest token, on any rank."""


@pytest.mark.parametrize("objective", choose(SEQUENCE_OBJECTIVES, SEQUENCE_OBJECTIVES[0]))
def test_sequence_losses_do_not_depend_on_split_or_layout(
    ranks: RankServer, stale: Path, tmp_path: Path, objective: dict[str, Any]
) -> None:
    every: tuple[dict[str, Any], ...] = (
        pack(96), {"cp": 2} | pack(100_000), {"dp": 2} | pack(64), {"tp": 2} | pack(96),
        {"pp": 2} | pack(64),
    )  # fmt: skip
    if "custom" in objective:  # the last two teach nothing
        every = every[:3]
    layouts = choose(every, *(layout for layout in every if layout.keys() & {"cp", "pp"}))
    pairs = check_layouts_agree(
        ranks, stale, tmp_path, objective, COMPARED, layouts=layouts, steps=STEPS, **pack(64)
    )
    masks = objective.get("off_policy_correction") == "mask"
    acting = "importance_weight/out_of_bounds_fraction" if masks else "ratio/clip_fraction"
    assert 0.01 < max(expected[acting] for _, expected in pairs) < 0.99


@pytest.fixture(scope="module")
def mixture(stale: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_for_mixture(stale, tmp_path_factory.mktemp("mixture") / "run")


AGGREGATIONS: tuple[dict[str, Any], ...] = (
    {"loss_agg": "token_mean"},
    {"loss_agg": "seq_mean_token_mean", **SEQUENCE_OBJECTIVES[0]},
    {"loss_agg": "seq_mean_token_sum"},
    {"loss_agg": "seq_mean_token_sum_norm", "loss_scale_tokens": 9},
)


@pytest.mark.parametrize(
    "objective", choose(AGGREGATIONS, AGGREGATIONS[1]), ids=lambda objective: objective["loss_agg"]
)
def test_experts_on_other_ranks_change_no_loss(
    ranks: RankServer, mixture: Path, tmp_path: Path, objective: dict[str, Any]
) -> None:
    """Compare loss and largest gradient norm of the first step, in other packs on other ranks."""
    (expected,) = train_copy(ranks, mixture, tmp_path / "1", objective, steps=1, **pack(100_000))
    (line,) = train_copy(
        ranks, mixture, tmp_path / "2", objective, parallel={"dp": 2, "ep": 2}, steps=1, **pack(96)
    )
    assert line["tokens/sampled"] == expected["tokens/sampled"]
    for name in ("loss", "grad_norm"):
        assert line[name] == pytest.approx(expected[name], rel=2e-6), name


def test_turns_are_credited_from_what_shards_record(ranks: RankServer, tmp_path: Path) -> None:
    paths = record_run(tmp_path / "run", 0)
    good = [MadeUpTurn(9, 0.5), MadeUpTurn(0, 0.0), MadeUpTurn(0, 1.0)]
    bad = [MadeUpTurn(9, 0.0), MadeUpTurn(0, 0.0), MadeUpTurn(0, 0.25)]
    rows = build_batch([[good, bad]], ExportSettings())
    shard = write_sealed_shard(rows, paths.shards_dir, paths.shard_index_dir, "cell-0")
    places, rewards = list(range(len(rows))), [row.reward for row in rows]
    ticket = SealedTicket(TicketRef(0, 0), shard.file, places, rewards, NO_VERSION)
    write_manifest(paths, BatchManifest(1, 1, [ticket]))
    largest = {}
    for credit in ("episode", "turn"):
        objective = {"credit": credit, "scale_rewards": "none"}
        (line,) = train_copy(ranks, paths.root, tmp_path / credit, objective, steps=1)
        largest[credit] = line["advantage/abs_max"]
    # Episodes earned 1.5 and .25. Their replies earned 1, 0, 1 and .125, 0, .25: .396 on average;
    # the last two of each weigh a half.
    assert largest == pytest.approx({"episode": 0.625, "turn": 1 - 2.375 / 6}, rel=1e-6)


@pytest.mark.parametrize("name", choose(PRESETS, "dr_grpo", "opd"))
def test_every_preset_trains_a_recorded_run(
    ranks: RankServer, stale: Path, tmp_path: Path, name: str
) -> None:
    teacher = {"coef": 1.0, "path": str(RunPaths(stale).starting_model_dir)}
    needed: dict[str, dict[str, Any]] = {
        "dr_grpo": {"loss_scale_tokens": 30},
        "opd": {"teacher": teacher},
    }
    more = needed.get(name, {})
    objective = {**PRESETS[name].objective, **more}
    lines = train_copy(ranks, stale, tmp_path / name, objective, steps=STEPS, **pack(64))
    assert len(lines) == STEPS
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)


GOOD = [MadeUpTurn(9, 0.5), MadeUpTurn(0, 0.0, tokens=3), MadeUpTurn(1, 1.0)]
BAD = [MadeUpTurn(9, 0.0), MadeUpTurn(0, 0.0), MadeUpTurn(1, 0.25)]


OBJECTIVE: dict[str, Any] = {"scale_rewards": "none"}
ONE_STEP: dict[str, Any] = {"steps": 1, "minibatches": 1}
MASKED = ("loss", "grad_norm", "entropy/mean", "importance_weight/mean")


def record_batch(folder: Path, spoil: Callable[[list[TrajectoryRow]], Any]) -> RunPaths:
    """Record a group of two episodes, of 7 and 6 sampled tokens, after `spoil`."""
    paths = record_run(folder, 0)
    rows = build_batch([[GOOD, BAD]], ExportSettings())
    rows = spoil(rows) or rows
    shard = write_sealed_shard(rows, paths.shards_dir, paths.shard_index_dir, "cell-0")
    rewards = [row.reward for row in rows]
    ticket = SealedTicket(TicketRef(0, 0), shard.file, [0, 1], rewards, NO_VERSION)
    write_manifest(paths, BatchManifest(1, 1, [ticket]))
    return paths


def train_batch(
    ranks: RankServer, folder: Path, spoil: Callable[[list[TrajectoryRow]], Any]
) -> dict[str, float]:
    recorded = record_batch(folder / "recorded", spoil)
    (line,) = train_copy(ranks, recorded.root, folder / "trained", OBJECTIVE, **ONE_STEP)
    return line


def make_second_reply_greedy(rows: list[TrajectoryRow]) -> None:
    rows[0].record.calls[1].sampling["temperature"] = 0.0


def take_second_reply_out(rows: list[TrajectoryRow]) -> list[TrajectoryRow]:
    call, mask_T = rows[0].record.calls[1], rows[0].loss_mask_T.copy()
    mask_T[call.prompt_tokens : call.prompt_tokens + call.reply_tokens] = 0
    return [replace(rows[0], loss_mask_T=mask_T), rows[1]]


def make_most_greedy(rows: list[TrajectoryRow]) -> None:
    for call in [*rows[0].record.calls, rows[1].record.calls[0]]:
        call.sampling.update({"temperature": 0.0, "top_k": 1})


def test_a_greedy_reply_is_trained_as_if_nobody_had_sampled_it(
    ranks: RankServer, tmp_path: Path
) -> None:
    all_sampled, line, other = (
        train_batch(ranks, tmp_path / name, spoil)
        for name, spoil in (
            ("plain", lambda rows: None),
            ("greedy", make_second_reply_greedy),
            ("out", take_second_reply_out),
        )
    )
    for name in ("loss", "grad_norm", "entropy/mean"):
        assert line[name] == pytest.approx(other[name], rel=1e-6)
    assert line["grad_norm"] != pytest.approx(all_sampled["grad_norm"], rel=1e-2)
    counts = [row["tokens/untrainable"] for row in (line, other, all_sampled)]
    assert counts == [3, 0, 0]
    assert line["tokens/sampled"] == all_sampled["tokens/sampled"] == 13


def test_a_batch_of_greedy_replies_ends_the_run_on_all_ranks(
    ranks: RankServer, tmp_path: Path
) -> None:
    paths = record_batch(tmp_path / "run", make_most_greedy)
    outcome = train_run(ranks, paths, OBJECTIVE, {"dp": 2}, **ONE_STEP)
    assert set(outcome.codes) in ({78}, {78, 143}), outcome.log  # the other may be stopped first
    assert not read_readable_records(paths.metrics)
    assert "9 of 13 sampled tokens were not sampled from the plain softmax" in outcome.log
    assert "temperature=0 and top_k (9)" in outcome.log
    assert "at: rollout.agent.sampling" in outcome.log


def record_masks(rows: list[TrajectoryRow]) -> list[TrajectoryRow]:
    """Record replies with a top_p that left some of 40 tokens at each position."""
    generator, rows_with_masks = np.random.default_rng(3), []
    for row in rows:
        ids = [
            [int(own), *generator.choice(np.setdiff1d(np.arange(40), own), 7, replace=False)]
            if is_sampled
            else []
            for own, is_sampled in zip(row.input_ids_T, row.loss_mask_T, strict=True)
        ]
        for call in row.record.calls:
            call.sampling["top_p"] = 0.9
        counts_T = np.array(list(map(len, ids)), np.uint16)
        flat = np.array([token_id for own in ids for token_id in own], np.int32)
        rows_with_masks.append(replace(row, sampling_mask=SamplingMask(counts_T, flat)))
    return rows_with_masks


STOPS = [300, 311]


def record_all_but_stops(rows: list[TrajectoryRow]) -> list[TrajectoryRow]:
    """Record replies sampled from all tokens but two, as masks of single ids."""
    rows_with_masks = []
    for row in rows:
        kept_ids = np.setdiff1d(np.arange(VOCAB), STOPS)
        counts_T = row.loss_mask_T.astype(np.uint16) * len(kept_ids)
        ids = np.tile(kept_ids, int(row.loss_mask_T.sum())).astype(np.int32)
        for call in row.record.calls:
            call.sampling["top_p"] = 0.9
        rows_with_masks.append(replace(row, sampling_mask=SamplingMask(counts_T, ids)))
    return rows_with_masks


def ask_for_long_replies(rows: list[TrajectoryRow]) -> None:
    for call in (call for row in rows for call in row.record.calls):
        call.sampling.update({"min_new_tokens": 100, "stop_token_ids": STOPS})


def test_a_least_length_is_trained_as_it_was_sampled(ranks: RankServer, tmp_path: Path) -> None:
    unmasked, expected = (
        train_batch(ranks, tmp_path / name, spoil)
        for name, spoil in (("plain", lambda rows: None), ("listed", record_all_but_stops))
    )
    forbidden = record_batch(tmp_path / "forbidden", ask_for_long_replies).root
    ((_, line),) = check_layouts_agree(
        ranks,
        forbidden,
        tmp_path,
        OBJECTIVE,
        MASKED,
        layouts=[{"tp": 2}],
        abs=1e-7,
        **ONE_STEP,
    )
    for metric in MASKED:
        assert line[metric] == pytest.approx(expected[metric], rel=2e-5, abs=1e-7), metric
    assert line["entropy/mean"] < unmasked["entropy/mean"] - 1e-4


def test_distributions_are_over_recorded_masks_in_every_layout(
    ranks: RankServer, tmp_path: Path
) -> None:
    recorded = record_batch(tmp_path / "recorded", record_masks).root
    layouts = [{"tp": 2}, {"cp": 2}, {"pp": 2}]
    pairs = check_layouts_agree(
        ranks,
        recorded,
        tmp_path,
        OBJECTIVE,
        MASKED,
        layouts=layouts,
        abs=1e-7,
        **ONE_STEP,
    )
    for _, expected in pairs:
        assert expected["tokens/untrainable"] == 0
        assert 0 < expected["entropy/mean"] <= np.log(8)


def test_tokens_between_replies_are_learned_as_by_transformers_in_float64(
    ranks: RankServer, tmp_path: Path
) -> None:
    """A row's second and third prompts have a token each: 201 and 202."""
    recorded = record_batch(tmp_path / "recorded", lambda rows: None)
    model = load_float64_model(recorded.starting_model_dir)
    rows = read_recorded_rows(recorded, 1)
    objective = ObjectiveConfig(observation_coef=0.5, **OBJECTIVE)
    policy_loss, cross_entropy = torch.zeros(()), torch.zeros(())
    for row, advantage in zip(rows, compute_advantages(rows, objective), strict=True):
        logprobs_t, _ = score_row(model, row)
        behavior_t = torch.from_numpy(row.logprobs_T[row.loss_mask_T != 0])
        weight_t = (logprobs_t.detach() - behavior_t).exp().clamp(max=5.0)
        policy_loss = policy_loss - (weight_t * advantage * logprobs_t).sum() / 13
        is_observed_T = np.isin(row.input_ids_T, [201, 202]).astype(np.uint8)
        observed, _ = score_row(model, replace(row, loss_mask_T=is_observed_T))
        cross_entropy = cross_entropy - observed.sum() / 4
    (policy_loss + 0.5 * cross_entropy).backward()
    keys = {**OBJECTIVE, "observation_coef": 0.5}
    ((line, _),) = check_layouts_agree(
        ranks,
        recorded.root,
        tmp_path,
        keys,
        ("loss", "grad_norm", "observation/loss", "entropy/mean"),
        layouts=[{"cp": 2}],
        abs=1e-7,
        **ONE_STEP,
    )
    assert line["observation/loss"] == pytest.approx(0.5 * cross_entropy.item(), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(measure_gradient_norm(model), rel=1e-4)
    (without,) = train_copy(ranks, recorded.root, tmp_path / "without", OBJECTIVE, **ONE_STEP)
    assert line["loss"] - line["observation/loss"] == pytest.approx(without["loss"], abs=1e-6)
    assert line["entropy/mean"] == pytest.approx(without["entropy/mean"], rel=1e-6)


MINIBATCHES = 2
OBJECTIVES: dict[str, dict[str, Any]] = {
    "default": {},
    "dr_grpo": {"loss_scale_tokens": 9},
    "gspo": {},
    "cispo": {"clip_high": 1e-3},
    "rloo": {},
}
"""Presets with further settings, without which the clip of `cispo` would not act."""


@pytest.mark.parametrize("name", choose(OBJECTIVES, *[*OBJECTIVES][:2]))
def test_steps_are_those_of_transformers_in_float64(
    ranks: RankServer, stale: Path, tmp_path: Path, name: str
) -> None:
    tree = {**PRESETS[name].objective, **OBJECTIVES[name]}
    paths = RunPaths(stale)
    reference = Float64Trainer(
        paths.starting_model_dir,
        ObjectiveConfig.model_validate(tree),
        AdamConfig.model_validate(TRAINER["optimizer"]),
        steps=STEPS,
        minibatches=MINIBATCHES,
    )
    rows_of_steps = [read_recorded_rows(paths, step) for step in range(1, STEPS + 1)]
    expected = [reference.train_batch(rows) for rows in rows_of_steps]
    for count in (1, 2):
        lines = train_copy(
            ranks, stale, tmp_path / str(count), tree,
            parallel={"dp": count}, steps=STEPS, minibatches=MINIBATCHES,
        )  # fmt: skip
        for line, (loss, norm) in zip(lines, expected, strict=True):
            assert line["loss"] == pytest.approx(loss, rel=2e-6, abs=2e-6), (count, line["step"])
            assert line["grad_norm"] == pytest.approx(norm, rel=1e-5), (count, line["step"])
        if name in ("gspo", "cispo"):
            assert any(line["ratio/clip_fraction"] > 0 for line in lines), "the clip acted"
        assert any(line["staleness/max"] > 0 for line in lines)
