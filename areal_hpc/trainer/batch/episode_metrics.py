"""Metrics of a batch's episodes, from what the proxy recorded of their model calls."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from areal_hpc.wire.row_record import CallRecord, RowRecord
from areal_hpc.wire.trajectory import TrajectoryRow

CUT_FINISH_REASON = "length"
"""How a reply ends that reached its limit of tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode of a batch: all that its rows know of it."""

    cell: str
    started_at: float
    """Unix time; 0 if it is not known."""
    ended_at: float
    calls: dict[str, CallRecord]
    """Its model calls by id; of one that several rows share, the record that trains it."""
    unrewarded_replies: int = 0
    """Replies that no reward reaches."""

    @property
    def duration_s(self) -> float:
        return max(0.0, self.ended_at - self.started_at) if self.started_at else 0.0


def merge_batch_rows_into_episodes(batch: Sequence[TrajectoryRow]) -> list[EpisodeRecord]:
    """The episodes of a batch."""
    found: dict[str, list[RowRecord]] = {}
    for row in batch:
        found.setdefault(row.record.session_id, []).append(row.record)
    return [merge_rows_into_episode(records) for records in found.values()]


def merge_rows_into_episode(records: Sequence[RowRecord]) -> EpisodeRecord:
    """The episode that these rows are of."""
    first, calls = records[0], dict[str, CallRecord]()
    for call in (call for record in records for call in record.calls):
        if call.trained or call.id not in calls:
            calls[call.id] = call
    return EpisodeRecord(
        first.cell, first.started_at, first.ended_at, calls, first.unrewarded_replies
    )


def summarize_episodes(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Turns, times, ends of replies, speed of generation, and numbers of the agents' own."""
    told = [episode for episode in episodes if episode.calls]
    speeds = [*_measure_cell_tokens_per_s(told)]
    return {
        **_summarize_turns_and_cut_replies(told),
        **_summarize_durations(told),
        **_summarize_throughput_and_caching(
            [call for episode in told for call in episode.calls.values()]
        ),
        **({"generation/slowest_cell_ratio": min(speeds) / max(speeds)} if speeds[1:] else {}),
        **_summarize_reward_parts_and_metrics(told),
    }


def _summarize_turns_and_cut_replies(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    if not episodes:
        return {}
    turns = [len(episode.calls) for episode in episodes]
    trained = [call for one in episodes for call in one.calls.values() if call.trained]
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
    # A clock that was set back in a call has that end before it began.
    in_calls_s = sum(
        measure_covered_s(
            (call.asked_at, call.answered_at)
            for call in one.calls.values()
            if call.asked_at <= call.answered_at
        )
        for one in timed
    )
    return {
        "episode/duration_mean_s": float(np.mean(durations)),
        "episode/duration_max_s": max(durations),
        "episode/tool_time_fraction": max(0.0, 1.0 - in_calls_s / sum(durations)),
    }


def merge_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that at least one span covers, as spans that do not touch one another."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def measure_covered_s(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in merge_spans(spans))


def _summarize_throughput_and_caching(calls: Sequence[CallRecord]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    timed = [call for call in calls if call.asked_at and call.answered_at]
    if timed:
        began, ended = min(one.asked_at for one in timed), max(one.answered_at for one in timed)
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


def _summarize_reward_parts_and_metrics(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Means over episodes of the parts and metrics that agents gave with their rewards.

    An episode with several rewards counts with their sums; one that does not name a number counts
    not at all for it.
    """
    sums_of: dict[str, list[float]] = {}
    for episode in episodes:
        own: dict[str, float] = {}
        rewards = [call.reward for call in episode.calls.values() if call.reward is not None]
        for reward in rewards:
            for kind, numbers in (("part", reward.parts), ("metric", reward.metrics)):
                for name, number in numbers.items():
                    key = f"reward/{kind}/{name}"
                    own[key] = own.get(key, 0.0) + number
        for key, number in own.items():
            sums_of.setdefault(key, []).append(number)
    return {key: float(np.mean(numbers)) for key, numbers in sums_of.items()}
