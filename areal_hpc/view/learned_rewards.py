"""Rewards that a replay's weights would have earned (`areal-hpc replay --rewards`).

The recorded weights sampled a batch. Its mean reward under the replayed weights is estimated by
weighting the episodes of a group by the ratios of their probabilities. The further the weights have
moved apart, the fewer episodes count; their effective share says how many.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from areal_hpc.evaluation.statistics import compare_paired, estimate_mean
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import read_annotations
from areal_hpc.view.batch_episodes import read_ticket_episodes
from areal_hpc.view.formatting import format_table


class GroupRewards(NamedTuple):
    """Mean rewards of one ticket's episodes."""

    recorded: float
    new: float
    replayed: float
    """By the new rewards, under the replayed weights."""
    effective_share: float
    """Effective share of the episodes in `replayed`."""


def describe_learned_rewards(
    run: RunPaths, replay: RunPaths, steps: Sequence[int]
) -> Iterator[str]:
    table = [["step", "recorded rewards", "new rewards", "under replayed weights", "effective"]]
    later_groups = list[GroupRewards]()
    for step in steps:
        groups = read_group_rewards(run, replay, step)
        if not groups:
            table.append([str(step), "not annotated", "", "", ""])
            continue
        *rewards, shares = zip(*groups, strict=True)
        estimates = [str(estimate_mean(values)) for values in rewards]
        table.append([str(step), *estimates, f"{fmean(shares):.0%}"])
        if step > steps[0]:  # the first step begins with the recorded weights
            later_groups += groups
    yield from format_table(table, {0})
    if later_groups:
        gain = compare_paired(
            [group.new for group in later_groups], [group.replayed for group in later_groups]
        )
        yield f"would have learned {gain.difference}: {gain.verdict}"


def read_group_rewards(run: RunPaths, replay: RunPaths, step: int) -> list[GroupRewards]:
    """Read the rewards of a batch by ticket, without tickets that the replay did not annotate."""
    annotations = read_annotations(replay, step)
    logprobs_of = {
        (row.shard, row.row): np.frombuffer(row.logprobs, "<f4")
        for row in (annotations.rows if annotations else [])
        if row.logprobs
    }
    reward_of = {
        (ticket.shard, row): reward
        for ticket in read_manifest(run, step).tickets
        for row, reward in zip(ticket.rows, ticket.rewards, strict=True)
    }
    groups = []
    for ticket, episodes in read_ticket_episodes(replay, step, with_messages=False):
        shard = ticket.shard
        if not {(shard, row) for row in ticket.rows} <= logprobs_of.keys():
            continue
        logs_E = np.zeros(len(episodes))
        for index, rows in enumerate(episodes):
            for number, row in rows.items():
                ratios = logprobs_of[shard, number] - row.logprobs_T[row.loss_mask_T == 1]
                logs_E[index] += np.nansum(ratios)  # NaN: the loss did not see the token
        recorded_E = [reward_of[shard, next(iter(rows))] for rows in episodes]
        rewards_E = np.array([next(iter(rows.values())).reward for rows in episodes])
        weights_E = np.exp(logs_E - logs_E.max())
        weights_E /= weights_E.sum()
        share = 1 / float((weights_E**2).sum()) / len(weights_E)
        replayed = float(weights_E @ rewards_E)
        groups.append(GroupRewards(fmean(recorded_E), float(rewards_E.mean()), replayed, share))
    return groups
