"""Episodes of trained batches, and what they did meanwhile, from manifests and shards."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
"""The last episodes of a batch are one, or this share of it."""
WAIT_PARTS = ("generation", "tools", "admission", "sealing")
"""What a wait for a batch is split into."""
WITHOUT_TOOL = ""
"""In the place of a tool's name: time between two calls of which the first called none."""


@dataclass(frozen=True, slots=True)
class BatchEpisode:
    step: int
    ticket_id: int
    attempt: int
    episode: int
    task: int
    """Line of the task set, -1 if it is not known."""
    mean_row_reward: float
    shard: str
    row: int
    """Its first row in the shard."""
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
        calls = (one for one in self.record.calls.values() if 0 < one.asked_at <= one.answered_at)
        return sorted(calls, key=lambda one: one.asked_at)

    @property
    def merged_call_spans(self) -> list[tuple[float, float]]:
        return merge_spans((one.asked_at, one.answered_at) for one in self.timed_calls)


def read_batch_episodes(
    paths: RunPaths, steps: Iterable[int], problems: list[str]
) -> list[BatchEpisode]:
    found: list[BatchEpisode] = []
    for step in steps:
        try:
            tickets = read_manifest(paths, step).tickets
        except ShardError as error:
            problems.append(str(error))
            continue
        for shard in dict.fromkeys(one.shard for one in tickets):
            try:
                reader = ShardReader(paths.shards_dir / shard)
                of_shard = [one for one in tickets if one.shard == shard]
                found += _read_episodes(reader, step, of_shard)
            except (ShardError, IndexError) as error:
                problems.append(f"{shard}: {error}")
    return found


def _read_episodes(
    reader: ShardReader, step: int, tickets: Sequence[SealedTicket]
) -> Iterator[BatchEpisode]:
    rows = [row for one in tickets for row in one.rows]
    records = dict(zip(rows, reader.read_records(rows), strict=True))
    numbers = reader.read_column("episode")
    for ticket in tickets:
        rewards = dict(zip(ticket.rows, ticket.rewards, strict=True))
        rows_of: dict[int, list[int]] = {}
        for row in ticket.rows:
            rows_of.setdefault(int(numbers[row]), []).append(row)
        for episode, own in rows_of.items():
            yield BatchEpisode(
                step=step,
                ticket_id=ticket.ref.ticket_id,
                attempt=ticket.ref.attempt,
                episode=episode,
                task=records[own[0]].task_index,
                mean_row_reward=sum(rewards[row] for row in own) / len(own),
                shard=ticket.shard,
                row=own[0],
                record=merge_rows_into_episode([records[row] for row in own]),
            )


def sum_batch_waits(
    rows: Sequence[MetricRow], episodes: Sequence[BatchEpisode]
) -> dict[str, float]:
    """What episodes did while the trainer waited for their batches; zeros if it is not known.

    The row's end and length tell when a step began. The wait follows the writing of the row before,
    which is nearly all of the time for small files.
    """
    waits = dict.fromkeys((*WAIT_PARTS, "last episodes", "calls", "any call"), 0.0)
    for row in rows:
        own = [one for one in episodes if one.step == row["step"] and one.is_timed]
        ended_at, step_s, wait_s = (
            row.get(name) for name in ("unix_time_s", "time/step_s", "time/batch_wait_s")
        )
        if own and ended_at and step_s and wait_s:
            begin = ended_at - step_s + (row.get("time/files_s") or 0.0)
            _add_wait(waits, begin, begin + wait_s, own)
    return waits


def _add_wait(
    waits: dict[str, float], from_time: float, to_time: float, episodes: Sequence[BatchEpisode]
) -> None:
    """Add the seconds of a wait for a batch between two Unix times, by what its episodes did.

    `generation` and `tools`: a moment counts for as much as the share of episodes that were in
    model calls, or outside of them. `admission`: no episode was under way, and some were still to
    begin. `sealing`: all had ended. Beside these: `last episodes` were awaited alone; `calls` is
    the sum over model calls of the time in which they were under way, `any call` the time in which
    any was.
    """
    most_last = max(1, int(MAX_LAST_EPISODES_SHARE * len(episodes)))
    under_way: Counter[str] = Counter()
    now = from_time
    for at, activity, change in sorted(_list_changes(episodes), key=lambda one: one[0]):
        until = min(max(at, from_time), to_time)
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
                waits["last episodes"] += took_s * (count <= most_last)
        under_way[activity] += change
    waits["sealing"] += max(0.0, to_time - now)


def _list_changes(episodes: Sequence[BatchEpisode]) -> Iterator[tuple[float, str, int]]:
    """When what began (1) or ended (-1)."""
    for one in episodes:
        spans_by_activity = {
            "episode": [(one.record.started_at, one.record.ended_at)],
            "in calls": one.merged_call_spans,
            "call": [(call.asked_at, call.answered_at) for call in one.timed_calls],
        }
        for activity, spans in spans_by_activity.items():
            for begin, end in spans:
                yield begin, activity, 1
                yield end, activity, -1


def read_first_rows(paths: RunPaths, episodes: Iterable[BatchEpisode]) -> list[TrajectoryRow]:
    chosen = list(episodes)
    places: dict[str, list[int]] = {}
    for place, one in enumerate(chosen):
        places.setdefault(one.shard, []).append(place)
    found: dict[int, TrajectoryRow] = {}
    for shard, own in places.items():  # all of a shard at once: a batch has thousands of episodes
        reader = ShardReader(paths.shards_dir / shard)
        rows = reader.read_rows([chosen[place].row for place in own])
        found |= zip(own, rows, strict=True)
    return [found[place] for place in range(len(chosen))]


def list_times_between_calls(row: TrajectoryRow) -> Iterator[tuple[str, float]]:
    """Times between a row's calls, in seconds, by the first tool that the earlier call called."""
    messages, placed = get_messages(row), list(locate_calls(row.record.calls))
    for (place, before), (_, after) in pairwise(placed):
        if not 0 < before.answered_at <= after.asked_at or place >= len(messages):
            continue
        names = [_get_tool_name(one) for one in get_raw_tool_calls(messages[place])]
        yield names[0] if names else WITHOUT_TOOL, after.asked_at - before.answered_at


def _get_tool_name(raw_call: object) -> str:
    function = raw_call.get("function") if isinstance(raw_call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return str(name or "?")[:100]


def read_distinct_reply_share(paths: RunPaths, episodes: Sequence[BatchEpisode]) -> float | None:
    """Of the replies of groups of several, the share that are distinct; None without such groups.

    1 is where no two episodes of a group said the same, 1 / episodes where all did.
    """
    replies: dict[tuple[int, int], list[bytes]] = {}
    rows = read_first_rows(paths, episodes)
    for one, row in zip(episodes, rows, strict=True):
        sampled = row.input_ids_T[row.loss_mask_T == 1]
        replies.setdefault((one.ticket_id, one.attempt), []).append(sampled.tobytes())
    shares = [len(set(group)) / len(group) for group in replies.values() if len(group) > 1]
    return float(np.mean(shares)) if shares else None
