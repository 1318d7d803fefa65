"""Metrics of a batch before training: rewards, groups, replies, ages of tokens, episodes."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.rundir.checkpoints import RewardRange
from areal_hpc.trainer.objective.advantages import compute_mean_episode_rewards
from areal_hpc.wire.trajectory import CallRecord, MixtureShape, RowRecord, TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion, compute_staleness_steps

_NGRAM_HASH_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64
)
_REPLY_HASH_FACTOR = 0xD6E8FEB86659FD93
"""Odd numbers that spread four tokens in a row, and the number of their reply, over 64 bits."""
REPETITION_TAIL_TOKENS = 256
"""Tokens at the end of a reply in which repetition is measured: loops continue to the end."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def summarize_tokens(
    batch: Sequence[TrajectoryRow],
    current_version: WeightVersion,
    generation_forks: Sequence[GenerationFork],
) -> dict[str, float]:
    """Count the batch's tokens, and summarize the age of the weights that sampled them."""
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
    """Count sampled tokens by version; versions form few, long stretches."""
    boundaries = np.flatnonzero(versions_T[1:] != versions_T[:-1]) + 1
    tokens = Counter[int]()
    for begin, end in itertools.pairwise([0, *boundaries.tolist(), len(versions_T)]):
        if (version := int(versions_T[begin])) >= 0:
            tokens[version] += end - begin
    return tokens


def summarize_expert_loads(
    batch: Sequence[TrajectoryRow], mixture: MixtureShape | None
) -> dict[str, float]:
    """Measure how unevenly the batch's tokens visited the experts of a layer when sampled."""
    if mixture is None:
        return {}
    first_of_layer_L1 = np.arange(mixture.layers)[:, None] * mixture.experts
    counts, tokens = np.zeros(mixture.layers * mixture.experts, np.int64), 0
    for routes_TLK in (row.routes_TLK for row in batch if row.routes_TLK is not None):
        known_tLK = routes_TLK[routes_TLK[:, 0, 0] < mixture.experts]
        counts += np.bincount((known_tLK + first_of_layer_L1).ravel(), minlength=len(counts))
        tokens += len(known_tLK)
    counts_LE = counts.reshape(mixture.layers, mixture.experts)
    # A layer without experts lists expert 0 several times for each token.
    counts_LE = counts_LE[counts_LE.max(1) <= tokens]
    if not counts_LE.any():
        return {}
    return {
        "experts/load_max_over_mean": float((counts_LE.max(1) / counts_LE.mean(1)).max()),
        "experts/unvisited": int((counts_LE == 0).sum()),
    }


# Rewards -----------------------------------------------------------------------------------------


def group_episode_rewards(batch: Sequence[TrajectoryRow]) -> list[FloatArray]:
    """Return the episodes' rewards by ticket; an episode's reward is the mean of its rows'."""
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
    """Summarize the batch's rewards, and the shares of groups at an end of the reward range.

    `reward_range` covers all batches up to this one; with equal ends no group is best or worst.
    """
    min_reward_std = objective.min_reward_std
    if not groups or reward_range is None:
        return {"episodes": 0, "groups": 0}
    rewards = np.concatenate(groups)
    means = np.array([group.mean() for group in groups])
    has_varied = reward_range.highest - reward_range.lowest >= min_reward_std

    def compute_share_at(reward_bound: float) -> float:
        is_near = [bool((abs(group - reward_bound) < min_reward_std).all()) for group in groups]
        return float(np.mean(is_near)) if has_varied else 0.0

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
    """Measure the lengths of the replies that the batch trains, and how much they repeat."""
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
    """Return the share of token runs that occur earlier in their reply; 0 for short replies."""
    keys = []
    for number, reply in enumerate(replies):
        ids = reply[-REPETITION_TAIL_TOKENS:].astype(np.uint64)
        runs = len(ids) - len(_NGRAM_HASH_FACTORS) + 1
        if runs > 0:
            hashes = np.full(runs, number * _REPLY_HASH_FACTOR % 2**64, np.uint64)
            for offset, factor in enumerate(_NGRAM_HASH_FACTORS):
                hashes += ids[offset : offset + runs] * factor
            keys.append(hashes)
    if not keys:
        return 0.0
    all_keys = np.concatenate(keys)
    return 1.0 - len(np.unique(all_keys)) / len(all_keys)


def compute_repeated_answer_share(batch: Sequence[TrajectoryRow]) -> float:
    """Return the share of pairs of episodes of different tickets that have the same answer."""
    answer_of: dict[tuple[int, int], bytes] = {}
    for row in batch:
        answer_of.setdefault((row.ticket_id, row.episode), get_row_answer(row))
    tickets = [ticket for ticket, _ in answer_of]
    own_answers = [*zip(tickets, answer_of.values(), strict=True)]
    pairs = len(tickets) ** 2 - _count_equal_pairs(tickets)
    equal = _count_equal_pairs(answer_of.values()) - _count_equal_pairs(own_answers)
    return equal / pairs if pairs else 0.0


def _count_equal_pairs(items: Iterable[Hashable]) -> int:
    """Count ordered pairs of equal items, those of an item with itself included."""
    return sum(count**2 for count in Counter(items).values())


def get_row_answer(row: TrajectoryRow) -> bytes:
    """Return the final answer as the agent gave it, else all tokens that the model sampled."""
    answers = [call.reward.answer for call in row.record.calls if call.reward is not None]
    if answers and answers[-1]:
        return answers[-1].encode()
    sampled: bytes = row.input_ids_T[row.loss_mask_T == 1].tobytes()
    return sampled


# Episodes, from what the proxy recorded of their model calls --------------------------------------

CUT_FINISH_REASON = "length"
"""Finish reason of a reply that reached its limit of tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode of a batch, merged from the records of its rows."""

    cell: str
    started_at: float
    """Unix time; 0 if unknown."""
    ended_at: float
    calls: dict[str, CallRecord]
    """Model calls by id; if several rows share a call, the record that trains it."""
    unrewarded_replies: int = 0
    """Number of replies that no reward reaches."""

    @property
    def duration_s(self) -> float:
        return max(0.0, self.ended_at - self.started_at) if self.started_at else 0.0


def summarize_batch(
    batch: Sequence[TrajectoryRow], mixture: MixtureShape | None
) -> dict[str, float]:
    """Return metrics of replies, expert loads and episodes; {} for an empty batch."""
    if not batch:
        return {}
    records_of: dict[str, list[RowRecord]] = {}
    for row in batch:
        records_of.setdefault(row.record.session_id, []).append(row.record)
    return {
        **summarize_replies(batch),
        "reply/repeated_answer_share": compute_repeated_answer_share(batch),
        **summarize_expert_loads(batch, mixture),
        **summarize_episodes([merge_rows_into_episode(records) for records in records_of.values()]),
    }


def merge_rows_into_episode(records: Sequence[RowRecord]) -> EpisodeRecord:
    first, calls = records[0], dict[str, CallRecord]()
    for call in (call for record in records for call in record.calls):
        if call.trained or call.id not in calls:
            calls[call.id] = call
    return EpisodeRecord(
        first.cell, first.started_at, first.ended_at, calls, first.unrewarded_replies
    )


def summarize_episodes(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Summarize turns, times, ends of replies, generation speed, and the agents' own numbers."""
    recorded = [episode for episode in episodes if episode.calls]
    speeds = [*_measure_cell_tokens_per_s(recorded)]
    return {
        **_summarize_turns(recorded),
        **_summarize_durations(recorded),
        **_summarize_throughput([call for episode in recorded for call in episode.calls.values()]),
        **({"generation/slowest_cell_ratio": min(speeds) / max(speeds)} if speeds[1:] else {}),
        **_summarize_agent_numbers(recorded),
    }


def _summarize_turns(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    if not episodes:
        return {}
    turns = [len(episode.calls) for episode in episodes]
    trained = [call for episode in episodes for call in episode.calls.values() if call.trained]
    metrics: dict[str, float] = {
        "episode/turns_mean": float(np.mean(turns)),
        "episode/turns_max": max(turns),
    }
    if unrewarded := sum(episode.unrewarded_replies for episode in episodes):
        metrics["reply/unrewarded"] = unrewarded
    if trained:
        cut = [call.finish_reason == CUT_FINISH_REASON for call in trained]
        metrics["reply/cut_fraction"] = float(np.mean(cut))
    return metrics


def _summarize_durations(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    timed = [episode for episode in episodes if episode.duration_s > 0]
    if not timed:
        return {}
    durations = [episode.duration_s for episode in timed]
    # If a clock was set back during a call, the call ends before it began.
    in_calls_s = sum(
        sum(
            end - begin
            for begin, end in merge_spans(
                (call.asked_at, call.answered_at)
                for call in episode.calls.values()
                if call.asked_at <= call.answered_at
            )
        )
        for episode in timed
    )
    return {
        "episode/duration_mean_s": float(np.mean(durations)),
        "episode/duration_max_s": max(durations),
        "episode/tool_time_fraction": max(0.0, 1.0 - in_calls_s / sum(durations)),
    }


def merge_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that at least one span covers, as disjoint spans."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _summarize_throughput(calls: Sequence[CallRecord]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    timed = [call for call in calls if call.asked_at and call.answered_at]
    if timed:
        began, ended = min(call.asked_at for call in timed), max(call.answered_at for call in timed)
        if ended > began:
            tokens = sum(call.reply_tokens for call in timed)
            metrics["generation/tokens_per_s"] = tokens / (ended - began)
    if prompt_tokens := sum(call.prompt_tokens for call in calls):
        cached = sum(call.cached_tokens for call in calls)
        metrics["generation/cached_prompt_fraction"] = cached / prompt_tokens
    return metrics


def _measure_cell_tokens_per_s(episodes: Sequence[EpisodeRecord]) -> Iterator[float]:
    for cell in sorted({episode.cell for episode in episodes if episode.cell}):
        calls = [
            call
            for episode in episodes
            if episode.cell == cell
            for call in episode.calls.values()
            if call.answered_at > call.asked_at > 0
        ]
        seconds = sum(call.answered_at - call.asked_at for call in calls)
        tokens = sum(call.reply_tokens for call in calls)
        if tokens:
            yield tokens / seconds


def _summarize_agent_numbers(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Average the parts and metrics of the agents' rewards over episodes.

    An episode with several rewards counts with their sums, and only for numbers that it has.
    """
    sums_of: dict[str, list[float]] = {}
    for episode in episodes:
        episode_sums: dict[str, float] = {}
        rewards = [call.reward for call in episode.calls.values() if call.reward is not None]
        for reward in rewards:
            for kind, numbers in (("part", reward.parts), ("metric", reward.metrics)):
                for name, number in numbers.items():
                    key = f"reward/{kind}/{name}"
                    episode_sums[key] = episode_sums.get(key, 0.0) + number
        for key, number in episode_sums.items():
            sums_of.setdefault(key, []).append(number)
    return {key: float(np.mean(numbers)) for key, numbers in sums_of.items()}
