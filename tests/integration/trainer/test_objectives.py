"""Objectives of stale batches say the same in every parallel layout."""

import math
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.recipe.presets import PRESETS
from areal_hpc.rundir.manifests import write_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.proxy import ExportSettings
from tests.support.rank_server import RankServer
from tests.support.recorded_run import record_run
from tests.support.replayed_run import check_layouts_agree, copy_for_mixture, train_copy
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
loss that leaves tokens out by what their whole row is like; rows that are judged whole, by ages of
tokens and by their largest token, on whichever rank it lies."""


@pytest.mark.parametrize("objective", choose(SEQUENCE_OBJECTIVES, SEQUENCE_OBJECTIVES[0]))
def test_sequence_losses_do_not_depend_on_split_or_layout(
    ranks: RankServer, stale: Path, tmp_path: Path, objective: dict[str, Any]
) -> None:
    every: tuple[dict[str, Any], ...] = (
        pack(96), {"cp": 2} | pack(100_000), {"dp": 2} | pack(64), {"tp": 2} | pack(96),
        {"pp": 2} | pack(64),
    )  # fmt: skip
    if "custom" in objective:  # of the last two it learns nothing
        every = every[:3]
    layouts = choose(every, *(one for one in every if one.keys() & {"cp", "pp"}))
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
    "objective", choose(AGGREGATIONS, AGGREGATIONS[1]), ids=lambda one: one["loss_agg"]
)
def test_experts_on_other_ranks_change_no_loss(
    ranks: RankServer, mixture: Path, tmp_path: Path, objective: dict[str, Any]
) -> None:
    """Loss and largest gradient norm of the first step, in other packs on other ranks."""
    (expected,) = train_copy(ranks, mixture, tmp_path / "1", objective, steps=1, **pack(100_000))
    (found,) = train_copy(
        ranks, mixture, tmp_path / "2", objective, parallel={"dp": 2, "ep": 2}, steps=1, **pack(96)
    )
    assert found["tokens/sampled"] == expected["tokens/sampled"]
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=2e-6), name


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
