"""Timeline of a run: what each process did from when to when, in the time of the ledger's node.

It comes from the spans of all processes. Where a cell or the trainer has none, as in a run of an
earlier version, its part comes from shards and metrics.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_hpc.errors import ShardError
from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.span_reader import ProcessSpans, read_spans, split_process_name
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.schema import parse_shard_name
from areal_hpc.trainer.batch.episode_metrics import merge_spans
from areal_hpc.view.batch_episodes import BatchEpisode, read_batch_episodes
from areal_hpc.view.metric_values import get_number
from areal_hpc.view.time_slices_on_lanes import Slice
from areal_hpc.wire.row_record import CallRecord, RowRecord

PLACED_PHASES_IN_ORDER = (
    *("files", "batch_wait", "read", "measure", "score", "pack", "train"),
    *("cell_wait", "publish", "checkpoint", "eval", "export"),
)
"""Phases of a step in the order in which the trainer comes to them."""
TRAINER_PROCESS = "trainer-trainer"
PROXY_ROLE, DRIVER_ROLE = "proxy", "driver"
EPISODES_LANE, REPLICA_LANE = "episodes", "replica "
AGENT_RECORDED_CALLS_LANE = "recorded by agents"
"""Of calls that no replica of the cell answered."""
PLACED_PHASES_NOTE = (
    "Of the trainer's phases only lengths are recorded: they are placed one after another."
)

EpisodeKey = tuple[int, int, int, int]
"""Ticket, attempt, evaluated step or -1, and number of an episode in its ticket."""


@dataclass(frozen=True, slots=True)
class Track:
    process: str
    lane: str
    slices: Sequence[Slice]
    node: str = ""
    call_spans_by_slice: Sequence[Sequence[tuple[float, float]]] = ()
    """On the lane of episodes: when model calls of each of them were under way."""

    @property
    def is_of_calls(self) -> bool:
        is_call_lane = self.lane.startswith(REPLICA_LANE) or self.lane == AGENT_RECORDED_CALLS_LANE
        return is_call_lane and split_process_name(self.process)[1] == PROXY_ROLE


@dataclass(frozen=True, slots=True)
class Timeline:
    begin: float
    end: float
    steps: Sequence[Slice]
    tracks: Sequence[Track]
    notes: Sequence[str] = ()


def select_timed_rows(
    rows: Iterable[JsonRow], first_step: float, last_step: float
) -> list[JsonRow]:
    return [
        row
        for row in rows
        if first_step <= row["step"] <= last_step
        and get_number(row, "unix_time_s")
        and get_number(row, "time/step_s")
    ]


def read_timeline(
    paths: RunPaths, rows: Sequence[JsonRow], from_time: float, to_time: float, problems: list[str]
) -> Timeline:
    """The timeline between two Unix times; `rows` are the metrics of the steps there.

    What cannot be read is named in `problems`.
    """
    processes = read_spans(paths, from_time, to_time)
    names = {one.name for one in processes}
    tracks = [track for one in processes for track in build_tracks(one)]
    notes = list(describe_clocks_and_lost_spans(processes))
    if not any(name.startswith(TRAINER_PROCESS) for name in names):
        phases = [phase for row in rows for phase in place_step_and_phases(row)[1]]
        tracks.insert(0, Track(TRAINER_PROCESS, "", phases))
        notes.append(PLACED_PHASES_NOTE)
    trained = read_batch_episodes(paths, [row["step"] for row in rows if row["step"] > 0], problems)
    tracks = annotate_episode_tracks(tracks, trained)
    told = {cell for cell, role in map(split_process_name, names) if role == DRIVER_ROLE}
    recorded = [
        _convert_trained_episode(one)
        for one in trained
        if one.is_timed and one.record.cell not in told
    ]
    recorded += read_untrained_episodes(paths, from_time, to_time, problems, told)
    tracks += build_tracks_of_records(recorded)
    steps = [place_step_and_phases(row)[0] for row in rows]
    return Timeline(from_time, to_time, steps, tracks, notes)


def describe_clocks_and_lost_spans(processes: Sequence[ProcessSpans]) -> Iterator[str]:
    nodes = {one.node: one.offset_s for one in processes if one.offset_s is not None}
    if off := {node: offset_s for node, offset_s in nodes.items() if abs(offset_s) >= 0.001}:
        told = ", ".join(f"{node} {-offset_s:+.3f} s" for node, offset_s in sorted(off.items()))
        yield f"Clocks that were off are corrected: {told}."
    if unknown := sorted({one.node for one in processes if one.offset_s is None} - nodes.keys()):
        yield f"Times of {', '.join(unknown)} are of their own clocks, which nobody compared."
    if lost := sum(one.lost for one in processes):
        yield f"{lost} spans were lost, because the storage did not take them."


def build_tracks(process: ProcessSpans) -> Iterator[Track]:
    by_lane: dict[str, list[Slice]] = {lane: [] for lane in process.lanes}
    for span in process.spans:
        by_lane[span.lane].append(Slice(span.name, span.begin, span.end, span.facts))
    for lane, slices in by_lane.items():
        yield Track(process.name, lane, slices, process.node)


def get_episode_key(span_fields: Mapping[str, Any]) -> EpisodeKey:
    return (
        *(span_fields.get("ticket_id", -1), span_fields.get("attempt", -1)),
        *(span_fields.get("eval_step", -1), span_fields.get("episode", -1)),
    )


def annotate_episode_tracks(
    tracks: Sequence[Track], episodes: Sequence[BatchEpisode]
) -> list[Track]:
    """Tracks whose episodes say their reward and row, and when calls of theirs were under way."""
    rows: dict[EpisodeKey, dict[str, Any]] = {
        (one.ticket_id, one.attempt, -1, one.episode): {
            "step": one.step,
            "reward": one.mean_row_reward,
            "row": one.first_row_name,
        }
        for one in episodes
    }
    calls: dict[EpisodeKey, list[tuple[float, float]]] = {}
    for track in tracks:
        if track.is_of_calls:
            for one in track.slices:
                calls.setdefault(get_episode_key(one.facts), []).append((one.begin, one.end))
    found = []
    for track in tracks:
        if track.lane == EPISODES_LANE:
            keys = [get_episode_key(one.facts) for one in track.slices]
            slices = [
                replace(one, name=_name_episode(key), facts={**one.facts, **rows.get(key, {})})
                for one, key in zip(track.slices, keys, strict=True)
            ]
            times = [list(merge_spans(calls.get(key, []))) for key in keys]
            track = replace(track, slices=slices, call_spans_by_slice=times)
        found.append(track)
    return found


def _name_episode(key: EpisodeKey) -> str:
    ticket_id, _, eval_step, episode = key
    name = f"ticket {ticket_id} episode {episode}"
    return name if eval_step < 0 else f"evaluation {eval_step} {name}"


# From shards and metrics ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    cell: str
    slice: Slice
    calls: tuple[CallRecord, ...]


def _convert_trained_episode(episode: BatchEpisode) -> RecordedEpisode:
    facts = {
        "step": episode.step,
        "reward": episode.mean_row_reward,
        "task": episode.task,
        "row": episode.first_row_name,
    }
    name = f"ticket {episode.ticket_id} episode {episode.episode}"
    span = Slice(name, episode.record.started_at, episode.record.ended_at, facts)
    return RecordedEpisode(episode.record.cell, span, tuple(episode.timed_calls))


def read_untrained_episodes(
    paths: RunPaths,
    from_time: float,
    to_time: float,
    problems: list[str],
    cells_with_spans: Container[str] = (),
) -> Iterator[RecordedEpisode]:
    """Held-out and failed episodes that were under way between two Unix times.

    Shards of the `cells_with_spans`, which say as much, are not opened: each look at a long run
    would read every evaluation.
    """
    for sealed in read_index(paths.shard_index_dir):
        named = parse_shard_name(sealed.file)
        if not sealed.untrained or (named is not None and named[0] in cells_with_spans):
            continue
        try:
            reader = ShardReader(paths.shards_dir / sealed.file)
            for one in sealed.untrained:
                records = reader.read_records(one.rows)
                if (
                    records
                    and records[0].started_at <= to_time
                    and from_time <= records[0].ended_at
                ):
                    yield _build_untrained_episode(
                        one.kind, f"{sealed.file}/{one.rows[0]}", records
                    )
        except (ShardError, IndexError) as error:
            problems.append(f"{sealed.file}: {error}")


def _build_untrained_episode(
    kind: str, first_row_name: str, records: Sequence[RowRecord]
) -> RecordedEpisode:
    first = records[0]
    calls = {call.id: call for record in records for call in record.calls}
    timed = [one for one in calls.values() if 0 < one.asked_at <= one.answered_at]
    facts = {"task": first.task_index, "row": first_row_name, "cause": first.cause}
    span = Slice(f"{kind} task {first.task_index}", first.started_at, first.ended_at, facts)
    return RecordedEpisode(first.cell, span, tuple(timed))


def build_tracks_of_records(episodes: Sequence[RecordedEpisode]) -> Iterator[Track]:
    for cell in sorted({one.cell for one in episodes}):
        own = [one for one in episodes if one.cell == cell]
        by_replica: dict[int, list[Slice]] = {}
        for one in own:
            for call in one.calls:
                span = _build_call_slice(one.slice.name, call)
                by_replica.setdefault(call.replica, []).append(span)
        for replica in sorted(by_replica):
            lane = f"{REPLICA_LANE}{replica}" if replica >= 0 else AGENT_RECORDED_CALLS_LANE
            yield Track(f"{cell}-{PROXY_ROLE}", lane, by_replica[replica])
        times = [
            list(merge_spans((call.asked_at, call.answered_at) for call in one.calls))
            for one in own
        ]
        yield Track(f"{cell}-{DRIVER_ROLE}", EPISODES_LANE, [one.slice for one in own], "", times)


def _build_call_slice(slice_name: str, call: CallRecord) -> Slice:
    facts = {
        "reply_tokens": call.reply_tokens,
        "prompt_tokens": call.prompt_tokens,
        "cached_tokens": call.cached_tokens,
        "finish": call.finish_reason,
    }
    return Slice(slice_name, call.asked_at, call.answered_at, facts)


def place_step_and_phases(row: JsonRow) -> tuple[Slice, list[Slice]]:
    """A step and its phases: these follow one another from its begin. Pure."""
    end, step_s = float(row["unix_time_s"]), float(row["time/step_s"])
    at = end - step_s
    facts = {name: row[name] for name in ("reward/mean", "limit", "version") if name in row}
    step = Slice(f"step {row['step']}", at, end, facts)
    phases = []
    for phase in PLACED_PHASES_IN_ORDER:
        seconds = get_number(row, f"time/{phase}_s") or 0.0
        if seconds > 0 and at < end:
            until = min(at + seconds, end)
            phases.append(Slice(phase, at, until))
            at = until
    return step, phases


def find_span_bounds(paths: RunPaths) -> tuple[float, float]:
    processes = read_spans(paths)
    begin = min((one.begin for one in processes), default=math.nan)
    return begin, max((one.end for one in processes), default=math.nan)
