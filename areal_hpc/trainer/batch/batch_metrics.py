"""Metrics of a batch before any training: rewards, groups, replies, ages of tokens. Pure numpy."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.rundir.checkpoints import RewardRange
from areal_hpc.trainer.objective.advantages import compute_mean_episode_rewards
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion, compute_staleness_steps

_NGRAM_HASH_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64
)
_REPLY_HASH_FACTOR = 0xD6E8FEB86659FD93
"""Odd numbers that spread four tokens in a row, and the number of their reply, over 64 bits."""
REPETITION_TAIL_TOKENS = 256
"""Tokens at the end of a reply in which repetition is looked for: loops go on to the end."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def summarize_tokens_and_staleness(
    batch: Sequence[TrajectoryRow],
    current_version: WeightVersion,
    generation_forks: Sequence[GenerationFork],
) -> dict[str, float]:
    """Number of the batch's tokens, and how old the weights are that sampled them."""
    tokens_of = [count_sampled_tokens_by_version(trajectory.versions_T) for trajectory in batch]
    sampled = sum(tokens_of, Counter[int]())
    ages = [
        compute_staleness_steps(current_version, WeightVersion.unpack(version), generation_forks)
        for version in sampled
    ]
    return {
        "tokens/trained": sum(trajectory.num_tokens for trajectory in batch),
        "tokens/sampled": sampled.total(),
        "staleness/mean": float(np.dot(ages, list(sampled.values())) / max(1, sampled.total())),
        "staleness/max": max(ages, default=0),
        "staleness/mixed_version_rows": sum(len(tokens) > 1 for tokens in tokens_of),
    }


def count_sampled_tokens_by_version(versions_T: IntArray) -> Counter[int]:
    """Tokens by the version they were sampled from; versions come in few, long stretches."""
    turns = np.flatnonzero(versions_T[1:] != versions_T[:-1]) + 1
    tokens = Counter[int]()
    for begin, end in itertools.pairwise([0, *turns.tolist(), len(versions_T)]):
        if (version := int(versions_T[begin])) >= 0:
            tokens[version] += end - begin
    return tokens


# Rewards -----------------------------------------------------------------------------------------


def group_episode_rewards(batch: Sequence[TrajectoryRow]) -> list[FloatArray]:
    """The episodes' rewards of each ticket of the batch; an episode's is the mean of its rows'."""
    rows_of: dict[int, list[TrajectoryRow]] = {}
    for row in batch:
        rows_of.setdefault(row.ticket_id, []).append(row)
    return [
        compute_mean_episode_rewards([row.reward for row in rows], [row.episode for row in rows])
        for rows in rows_of.values()
    ]


def extend_reward_range(
    earlier_range: RewardRange | None, groups: Sequence[FloatArray]
) -> RewardRange | None:
    lowest = [group.min() for group in groups] + ([earlier_range.lowest] if earlier_range else [])
    highest = [group.max() for group in groups] + ([earlier_range.highest] if earlier_range else [])
    return RewardRange(float(min(lowest)), float(max(highest))) if lowest else None


def summarize_rewards(
    groups: Sequence[FloatArray], reward_range: RewardRange | None, objective: ObjectiveConfig
) -> dict[str, float]:
    """Rewards of the batch, and shares of groups at an end of their range; none without rewards.

    `reward_range` is the range of rewards up to and including this batch: without a difference
    between its ends nothing is best or worst.
    """
    min_reward_std = objective.min_reward_std
    if not groups or reward_range is None:
        return {"episodes": 0, "groups": 0}
    rewards = np.concatenate(groups)
    means = np.array([group.mean() for group in groups])
    has_varied = reward_range.highest - reward_range.lowest >= min_reward_std

    def compute_share_at(reward_bound: float) -> float:
        near = [bool((abs(group - reward_bound) < min_reward_std).all()) for group in groups]
        return float(np.mean(near)) if has_varied else 0.0

    return {
        "episodes": len(rewards),
        "groups": len(groups),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/standard_error": (
            float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0
        ),
        "groups/all_best": compute_share_at(reward_range.highest),
        "groups/all_worst": compute_share_at(reward_range.lowest),
    }


# Replies -----------------------------------------------------------------------------------------


def summarize_replies(batch: Sequence[TrajectoryRow]) -> dict[str, float]:
    """Lengths of the replies that the batch trains, and how much they repeat themselves."""
    replies = []
    for row in batch:
        edges = np.flatnonzero(np.diff(row.loss_mask_T, prepend=0, append=0))
        replies += [row.input_ids_T[begin:end] for begin, end in edges.reshape(-1, 2).tolist()]
    if not replies:
        return {}
    lengths = np.array([len(reply) for reply in replies])
    return {
        "reply/tokens_mean": float(lengths.mean()),
        "reply/tokens_p95": float(np.percentile(lengths, 95)),
        "reply/tokens_max": int(lengths.max()),
        "reply/repeated_fraction": compute_repeated_ngram_fraction(replies),
    }


def compute_repeated_ngram_fraction(replies: Sequence[npt.NDArray[np.int32]]) -> float:
    """Runs of tokens that came before in the same reply, as a share of all; 0 for short replies."""
    keys = []
    for number, reply in enumerate(replies):
        ids = reply[-REPETITION_TAIL_TOKENS:].astype(np.uint64)
        runs = len(ids) - len(_NGRAM_HASH_FACTORS) + 1
        if runs > 0:
            hashes = np.full(runs, number * _REPLY_HASH_FACTOR % 2**64, np.uint64)
            for place, factor in enumerate(_NGRAM_HASH_FACTORS):
                hashes += ids[place : place + runs] * factor
            keys.append(hashes)
    if not keys:
        return 0.0
    every = np.concatenate(keys)
    return 1.0 - len(np.unique(every)) / len(every)
