"""Replies not sampled from the plain softmax: out of the loss, in the metrics, or refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.manifests import write_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import SamplingMask, TrajectoryRow
from tests.support.rank_server import RankServer
from tests.support.recorded_run import VOCAB, record_run
from tests.support.replayed_run import check_layouts_agree, train_copy, train_run
from tests.support.sample_episodes import MadeUpTurn, build_batch

GOOD = [MadeUpTurn(9, 0.5), MadeUpTurn(0, 0.0, tokens=3), MadeUpTurn(1, 1.0)]
BAD = [MadeUpTurn(9, 0.0), MadeUpTurn(0, 0.0), MadeUpTurn(1, 0.25)]


OBJECTIVE = {"scale_rewards": "none"}
ONE_STEP: dict[str, Any] = {"steps": 1, "minibatches": 1}
COMPARED = ("loss", "grad_norm", "entropy/mean", "importance_weight/mean")


def record_batch(folder: Path, spoil: Callable[[list[TrajectoryRow]], Any]) -> RunPaths:
    """A recorded group of two episodes, of 7 and 6 sampled tokens, after `spoil`."""
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
    whole, line, other = (
        train_batch(ranks, tmp_path / name, spoil)
        for name, spoil in (
            ("plain", lambda rows: None),
            ("greedy", make_second_reply_greedy),
            ("out", take_second_reply_out),
        )
    )
    for name in ("loss", "grad_norm", "entropy/mean"):
        assert line[name] == pytest.approx(other[name], rel=1e-6)
    assert line["grad_norm"] != pytest.approx(whole["grad_norm"], rel=1e-2)
    counts = [one["tokens/untrainable"] for one in (line, other, whole)]
    assert counts == [3, 0, 0]
    assert line["tokens/sampled"] == whole["tokens/sampled"] == 13


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
    """Replies with a top_p of which some of 40 tokens were left in each place."""
    generator, found = np.random.default_rng(3), []
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
        flat = np.array([one for own in ids for one in own], np.int32)
        found.append(replace(row, sampling_mask=SamplingMask(counts_T, flat)))
    return found


STOPS = [300, 311]


def record_all_but_stops(rows: list[TrajectoryRow]) -> list[TrajectoryRow]:
    """Every reply was sampled from all tokens but two, which were written down one by one."""
    found = []
    for row in rows:
        kept = np.setdiff1d(np.arange(VOCAB), STOPS)
        counts_T = row.loss_mask_T.astype(np.uint16) * len(kept)
        ids = np.tile(kept, int(row.loss_mask_T.sum())).astype(np.int32)
        for call in row.record.calls:
            call.sampling["top_p"] = 0.9
        found.append(replace(row, sampling_mask=SamplingMask(counts_T, ids)))
    return found


def ask_for_long_replies(rows: list[TrajectoryRow]) -> None:
    for call in (call for row in rows for call in row.record.calls):
        call.sampling.update({"min_new_tokens": 100, "stop_token_ids": STOPS})


def test_a_least_length_is_trained_as_it_was_sampled(ranks: RankServer, tmp_path: Path) -> None:
    whole, expected = (
        train_batch(ranks, tmp_path / name, spoil)
        for name, spoil in (("plain", lambda rows: None), ("listed", record_all_but_stops))
    )
    forbidden = record_batch(tmp_path / "forbidden", ask_for_long_replies).root
    ((_, found),) = check_layouts_agree(
        ranks, forbidden, tmp_path, OBJECTIVE, COMPARED, layouts=[{"tp": 2}], abs=1e-7, **ONE_STEP
    )
    for metric in COMPARED:
        assert found[metric] == pytest.approx(expected[metric], rel=2e-5, abs=1e-7), metric
    assert found["entropy/mean"] < whole["entropy/mean"] - 1e-4


def test_distributions_are_over_recorded_masks_in_every_layout(
    ranks: RankServer, tmp_path: Path
) -> None:
    recorded = record_batch(tmp_path / "recorded", record_masks).root
    layouts = [{"tp": 2}, {"cp": 2}, {"pp": 2}]
    pairs = check_layouts_agree(
        ranks, recorded, tmp_path, OBJECTIVE, COMPARED, layouts=layouts, abs=1e-7, **ONE_STEP
    )
    for _, expected in pairs:
        assert expected["tokens/untrainable"] == 0
        assert 0 < expected["entropy/mean"] <= np.log(8)
