"""Episodes of trained batches and the times of their activities, from manifests and shards."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from areal_hpc.errors import ShardError
from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.reader import ShardReader
from areal_hpc.trainer.batch.batch_metrics import (
    EpisodeRecord,
    merge_rows_into_episode,
    merge_spans,
)
from areal_hpc.view.transcripts.messages import get_messages, get_raw_tool_calls, locate_calls
from areal_hpc.wire.ledger import SealedTicket
from areal_hpc.wire.trajectory import CallRecord, TrajectoryRow

MAX_LAST_EPISODES_SHARE = 0.05
"""Share of a batch that counts as its last episodes; at least one does."""
WAIT_PARTS = ("generation", "tools", "admission", "sealing")
WITHOUT_TOOL = ""
"""Name of the time between two model calls of which the first called no tool."""


@dataclass(frozen=True, slots=True)
class BatchEpisode:
    step: int
    ticket_id: int
    attempt: int
    episode: int
    task: int
    """Line of the task set; -1 if unknown."""
    mean_row_reward: float
    shard: str
    row: int
    """First row of the episode in the shard."""
    record: EpisodeRecord

    @property
    def first_row_name(self) -> str:
        return f"{self.shard}/{self.row}"

    @property
    def title(self) -> str:
        return f"episode {self.episode} of ticket {self.ticket_id}, step {self.step}"

    @property
    def is_timed(self) -> bool:
        return 0 < self.record.started_at <= self.record.ended_at

    @property
    def timed_calls(self) -> list[CallRecord]:
        calls = self.record.calls.values()
        timed = (call for call in calls if 0 < call.asked_at <= call.answered_at)
        return sorted(timed, key=lambda call: call.asked_at)

    @property
    def merged_call_spans(self) -> list[tuple[float, float]]:
        return merge_spans((call.asked_at, call.answered_at) for call in self.timed_calls)


def read_batch_episodes(
    paths: RunPaths, steps: Iterable[int], problems: list[str]
) -> list[BatchEpisode]:
    episodes: list[BatchEpisode] = []
    for step in steps:
        try:
            tickets = read_manifest(paths, step).tickets
        except ShardError as error:
            problems.append(str(error))
            continue
        for shard in dict.fromkeys(ticket.shard for ticket in tickets):
            try:
                reader = ShardReader(paths.shards_dir / shard)
                shard_tickets = [ticket for ticket in tickets if ticket.shard == shard]
                episodes += _read_episodes(reader, step, shard_tickets)
            except (ShardError, IndexError) as error:
                problems.append(f"{shard}: {error}")
    return episodes


def _read_episodes(
    reader: ShardReader, step: int, tickets: Sequence[SealedTicket]
) -> Iterator[BatchEpisode]:
    rows = [row for ticket in tickets for row in ticket.rows]
    records = dict(zip(rows, reader.read_records(rows), strict=True))
    episode_numbers = reader.read_column("episode")
    for ticket in tickets:
        rewards = dict(zip(ticket.rows, ticket.rewards, strict=True))
        rows_by_episode: dict[int, list[int]] = {}
        for row in ticket.rows:
            rows_by_episode.setdefault(int(episode_numbers[row]), []).append(row)
        for episode, episode_rows in rows_by_episode.items():
            yield BatchEpisode(
                step=step,
                ticket_id=ticket.ref.ticket_id,
                attempt=ticket.ref.attempt,
                episode=episode,
                task=records[episode_rows[0]].task_index,
                mean_row_reward=sum(rewards[row] for row in episode_rows) / len(episode_rows),
                shard=ticket.shard,
                row=episode_rows[0],
                record=merge_rows_into_episode([records[row] for row in episode_rows]),
            )


def read_ticket_episodes(
    paths: RunPaths, step: int, *, with_messages: bool = True
) -> Iterator[tuple[SealedTicket, list[dict[int, TrajectoryRow]]]]:
    """Read a batch's tickets, and each episode's rows by number, with the manifest's rewards.

    Raises:
        ShardError: A file of the batch is gone or damaged.
    """
    tickets = read_manifest(paths, step).tickets
    readers = {name: ShardReader(paths.shards_dir / name) for name in {t.shard for t in tickets}}
    for ticket in tickets:
        rows = readers[ticket.shard].read_rows(ticket.rows, with_messages=with_messages)
        episodes: dict[int, dict[int, TrajectoryRow]] = {}
        for number, row, reward in zip(ticket.rows, rows, ticket.rewards, strict=True):
            episodes.setdefault(row.episode, {})[number] = replace(row, reward=reward)
        yield ticket, [*episodes.values()]


def sum_batch_waits(
    rows: Sequence[MetricRow], episodes: Sequence[BatchEpisode]
) -> dict[str, float]:
    """Sum what episodes did while the trainer waited for their batches; zeros if it is unknown.

    The begin of a step follows from its row's end and length. The wait begins after the previous
    row is written, which takes nearly all of the step's time for small files.
    """
    waits = dict.fromkeys((*WAIT_PARTS, "last episodes", "calls", "any call"), 0.0)
    timed = [episode for episode in episodes if episode.is_timed]
    for row in rows:
        batch = [episode for episode in timed if episode.step == row["step"]]
        ended_at, step_s, wait_s = (
            row.get(name) for name in ("unix_time_s", "time/step_s", "time/batch_wait_s")
        )
        if batch and ended_at and step_s and wait_s:
            begin = ended_at - step_s + (row.get("time/files_s") or 0.0)
            _add_wait(waits, begin, begin + wait_s, batch)
    return waits


def _add_wait(
    waits: dict[str, float], from_time: float, to_time: float, episodes: Sequence[BatchEpisode]
) -> None:
    """Add the seconds of a wait for a batch between two Unix times, by what its episodes did.

    `generation` and `tools`: each moment counts by the share of episodes that were in model calls,
    or outside of them. `admission`: no episode was under way, and some had not begun. `sealing`:
    all had ended. Beside these: `last episodes` is the time in which only those were awaited;
    `calls` is the sum over model calls of the time in which they were under way, `any call` the
    time in which at least one was.
    """
    max_last = max(1, int(MAX_LAST_EPISODES_SHARE * len(episodes)))
    under_way: Counter[str] = Counter()
    now = from_time
    for time, activity, change in sorted(_list_changes(episodes), key=lambda item: item[0]):
        until = min(max(time, from_time), to_time)
        if (took_s := until - now) > 0:
            now, calls = until, under_way["call"]
            waits["calls"] += took_s * calls
            waits["any call"] += took_s * (calls > 0)
            if (count := under_way["episode"]) == 0:
                waits["admission"] += took_s
            else:
                # A call may end a moment after the agent closed its session.
                calling = min(1.0, under_way["in calls"] / count)
                waits["generation"] += took_s * calling
                waits["tools"] += took_s * (1.0 - calling)
                waits["last episodes"] += took_s * (count <= max_last)
        under_way[activity] += change
    waits["sealing"] += max(0.0, to_time - now)


def _list_changes(episodes: Sequence[BatchEpisode]) -> Iterator[tuple[float, str, int]]:
    """Yield the time and activity of each begin (1) and end (-1)."""
    for episode in episodes:
        spans_by_activity = {
            "episode": [(episode.record.started_at, episode.record.ended_at)],
            "in calls": episode.merged_call_spans,
            "call": [(call.asked_at, call.answered_at) for call in episode.timed_calls],
        }
        for activity, spans in spans_by_activity.items():
            for begin, end in spans:
                yield begin, activity, 1
                yield end, activity, -1


def read_first_rows(paths: RunPaths, episodes: Iterable[BatchEpisode]) -> list[TrajectoryRow]:
    chosen = list(episodes)
    indices_by_shard: dict[str, list[int]] = {}
    for index, episode in enumerate(chosen):
        indices_by_shard.setdefault(episode.shard, []).append(index)
    row_by_index: dict[int, TrajectoryRow] = {}
    # All rows of a shard at once: a batch has thousands of episodes.
    for shard, indices in indices_by_shard.items():
        reader = ShardReader(paths.shards_dir / shard)
        rows = reader.read_rows([chosen[index].row for index in indices])
        row_by_index |= zip(indices, rows, strict=True)
    return [row_by_index[index] for index in range(len(chosen))]


def list_times_between_calls(row: TrajectoryRow) -> Iterator[tuple[str, float]]:
    """Yield the seconds between a row's calls, with the first tool that the earlier call called."""
    messages, located = get_messages(row), list(locate_calls(row.record.calls))
    for (index, before), (_, after) in pairwise(located):
        if not 0 < before.answered_at <= after.asked_at or index >= len(messages):
            continue
        names = [_get_tool_name(tool_call) for tool_call in get_raw_tool_calls(messages[index])]
        yield names[0] if names else WITHOUT_TOOL, after.asked_at - before.answered_at


def _get_tool_name(raw_call: object) -> str:
    function = raw_call.get("function") if isinstance(raw_call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return str(name or "?")[:100]


def read_distinct_reply_share(paths: RunPaths, episodes: Sequence[BatchEpisode]) -> float | None:
    """Return the mean share of distinct replies in groups of several; None without such groups.

    It is 1 if all replies of each group differ, and 1 / episodes if all are the same.
    """
    replies: dict[tuple[int, int], list[bytes]] = {}
    rows = read_first_rows(paths, episodes)
    for episode, row in zip(episodes, rows, strict=True):
        sampled = row.input_ids_T[row.loss_mask_T == 1]
        replies.setdefault((episode.ticket_id, episode.attempt), []).append(sampled.tobytes())
    shares = [len(set(group)) / len(group) for group in replies.values() if len(group) > 1]
    return float(np.mean(shares)) if shares else None
