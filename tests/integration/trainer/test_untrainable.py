"""Replies not sampled from the plain softmax: out of the loss, in the metrics, or refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.manifests import write_or_read_manifest
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import SamplingMask, TrajectoryRow
from tests.support.rank_server import RankServer, TaskExit
from tests.support.recorded_run import VOCAB, record_run
from tests.support.sample_episodes import MadeUpTurn, build_batch

GOOD = [MadeUpTurn(9, 0.5), MadeUpTurn(0, 0.0, tokens=3), MadeUpTurn(1, 1.0)]
BAD = [MadeUpTurn(9, 0.0), MadeUpTurn(0, 0.0), MadeUpTurn(1, 0.25)]


def train_one_batch(
    ranks: RankServer, folder: Path, spoil: Callable[[list[TrajectoryRow]], Any], **parallel: int
) -> tuple[TaskExit, list[dict[str, float]]]:
    """A step on a recorded group of two episodes, of 7 and 6 sampled tokens, after `spoil`."""
    paths = record_run(folder, 0)
    rows = build_batch([[GOOD, BAD]], ExportSettings())
    rows = spoil(rows) or rows
    shard = write_sealed_shard(rows, paths.shards_dir, paths.shard_index_dir, "cell-0")
    rewards = [row.reward for row in rows]
    ticket = SealedTicket(TicketRef(0, 0), shard.file, [0, 1], rewards, NO_VERSION)
    write_or_read_manifest(paths, BatchManifest(1, 1, [ticket]))
    settings = {"total_steps": 1, "parallel": parallel, "objective": {"scale_rewards": "none"}}
    outcome = ranks.run(paths, "replay", max(1, *parallel.values(), 1), trainer=settings)
    return outcome, read_readable_records(paths.metrics) if paths.metrics.exists() else []


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
    plain, found, expected = (
        train_one_batch(ranks, tmp_path / name, spoil)
        for name, spoil in (
            ("plain", lambda rows: None),
            ("greedy", make_second_reply_greedy),
            ("out", take_second_reply_out),
        )
    )
    assert [one.codes for one, _ in (plain, found, expected)] == [[0]] * 3, found[0].log
    (line,), (other,), (whole,) = found[1], expected[1], plain[1]
    for name in ("loss", "grad_norm", "entropy/mean"):
        assert line[name] == pytest.approx(other[name], rel=1e-6)
    assert line["grad_norm"] != pytest.approx(whole["grad_norm"], rel=1e-2)
    counts = [one["tokens/untrainable"] for one in (line, other, whole)]
    assert counts == [3, 0, 0]
    assert line["tokens/sampled"] == whole["tokens/sampled"] == 13


def test_a_batch_of_greedy_replies_ends_the_run_on_all_ranks(
    ranks: RankServer, tmp_path: Path
) -> None:
    outcome, lines = train_one_batch(ranks, tmp_path / "run", make_most_greedy, dp=2)
    assert set(outcome.codes) in ({78}, {78, 143}), outcome.log  # the other may be stopped first
    assert lines == []
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
    plain, listed, forbidden, split = (
        train_one_batch(ranks, tmp_path / name, spoil, **parallel)
        for name, spoil, parallel in (
            ("plain", lambda rows: None, {}),
            ("listed", record_all_but_stops, {}),
            ("forbidden", ask_for_long_replies, {}),
            ("split", ask_for_long_replies, {"tp": 2}),
        )
    )
    assert {code for one, _ in (plain, listed, forbidden, split) for code in one.codes} == {0}
    (whole,), (expected,), (found,), (in_parts,) = (
        lines for _, lines in (plain, listed, forbidden, split)
    )
    for metric in ("loss", "grad_norm", "entropy/mean", "importance_weight/mean"):
        assert found[metric] == pytest.approx(expected[metric], rel=2e-5, abs=1e-7), metric
        assert in_parts[metric] == pytest.approx(expected[metric], rel=2e-5, abs=1e-7), metric
    assert found["entropy/mean"] < whole["entropy/mean"] - 1e-4


def test_distributions_are_over_recorded_masks_in_every_layout(
    ranks: RankServer, tmp_path: Path
) -> None:
    lines = {}
    for name, parallel in (("1", {}), ("tp", {"tp": 2}), ("cp", {"cp": 2}), ("pp", {"pp": 2})):
        outcome, found = train_one_batch(ranks, tmp_path / name, record_masks, **parallel)
        assert set(outcome.codes) == {0}, outcome.log
        (lines[name],) = found
    expected = lines.pop("1")
    assert expected["tokens/untrainable"] == 0
    assert 0 < expected["entropy/mean"] <= np.log(8)
    for name, line in lines.items():
        for metric in ("loss", "grad_norm", "entropy/mean", "importance_weight/mean"):
            assert line[metric] == pytest.approx(expected[metric], rel=2e-5, abs=1e-7), name
