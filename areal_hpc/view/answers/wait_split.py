"""Split of a wait for a batch by what its episodes were doing meanwhile. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from areal_hpc.view.batch_episodes import BatchEpisode

MAX_LAST_EPISODES_SHARE = 0.05


@dataclass(slots=True)
class WaitSplit:
    """Seconds of waits, by what the episodes of the awaited batches were doing."""

    generation_s: float = 0.0
    """Episodes were in model calls. A moment counts for as much as the share of those that were."""
    outside_calls_s: float = 0.0
    """Episodes were between, before or after their calls: tools, rewards, the agent's own code."""
    no_episode_s: float = 0.0
    """No episode of the batch was under way, and some were still to begin."""
    sealing_s: float = 0.0
    """All of its episodes had ended: they were sealed and settled."""
    last_episodes_s: float = 0.0
    """Only the last episodes were: one, or `MAX_LAST_EPISODES_SHARE` of them."""
    summed_call_s: float = 0.0
    """Sum over model calls of the time in which they were under way..."""
    any_call_s: float = 0.0
    """...and the time in which any was."""
    only_active_cell_s: dict[str, float] = field(default_factory=dict)
    """By cell: only episodes of this one were under way."""

    @property
    def total_s(self) -> float:
        return self.generation_s + self.outside_calls_s + self.no_episode_s + self.sealing_s

    def add(self, other_wait: "WaitSplit") -> None:
        self.generation_s += other_wait.generation_s
        self.outside_calls_s += other_wait.outside_calls_s
        self.no_episode_s += other_wait.no_episode_s
        self.sealing_s += other_wait.sealing_s
        self.last_episodes_s += other_wait.last_episodes_s
        self.summed_call_s += other_wait.summed_call_s
        self.any_call_s += other_wait.any_call_s
        for cell, seconds in other_wait.only_active_cell_s.items():
            self.only_active_cell_s[cell] = self.only_active_cell_s.get(cell, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class _CountChange:
    at: float
    activity: str
    cell: str
    by: int


def split_wait_by_activity(
    from_time: float, to_time: float, episodes: Sequence[BatchEpisode]
) -> WaitSplit:
    changes = sorted(_list_changes(episodes), key=lambda one: one.at)
    most_last = max(1, int(MAX_LAST_EPISODES_SHARE * len(episodes)))
    split, counts, by_cell = WaitSplit(), Counter[str](), Counter[str]()
    now = from_time
    for change in changes:
        until = min(max(change.at, from_time), to_time)
        if until > now:
            _add_seconds_to_split(split, until - now, counts, by_cell, most_last)
            now = until
        counts[change.activity] += change.by
        if change.activity == "episode":
            by_cell[change.cell] += change.by
    # After the last change no episode is under way, nor will be.
    split.sealing_s += max(0.0, to_time - now)
    return split


def _list_changes(episodes: Iterable[BatchEpisode]) -> Iterator[_CountChange]:
    for one in episodes:
        if not one.is_timed:
            continue
        cell, record = one.record.cell, one.record
        yield from _list_span_changes("episode", cell, [(record.started_at, record.ended_at)])
        yield from _list_span_changes("in calls", cell, one.merged_call_spans)
        calls = [(call.asked_at, call.answered_at) for call in one.timed_calls]
        yield from _list_span_changes("call", cell, calls)


def _list_span_changes(
    activity: str, cell: str, spans: Iterable[tuple[float, float]]
) -> Iterator[_CountChange]:
    for begin, end in spans:
        yield _CountChange(begin, activity, cell, 1)
        yield _CountChange(end, activity, cell, -1)


def _add_seconds_to_split(
    wait_split: WaitSplit,
    seconds: float,
    counts: Counter[str],
    by_cell: Counter[str],
    most_last: int,
) -> None:
    wait_split.summed_call_s += seconds * counts["call"]
    wait_split.any_call_s += seconds * (counts["call"] > 0)
    under_way = counts["episode"]
    if not under_way:
        wait_split.no_episode_s += seconds
        return
    # A call may end a moment after the agent closed its session: it counts as if it had not.
    calling = min(1.0, counts["in calls"] / under_way)
    wait_split.generation_s += seconds * calling
    wait_split.outside_calls_s += seconds * (1.0 - calling)
    if under_way <= most_last:
        wait_split.last_episodes_s += seconds
    cells = [cell for cell, count in by_cell.items() if count > 0]
    if len(cells) == 1:
        wait_split.only_active_cell_s[cells[0]] = (
            wait_split.only_active_cell_s.get(cells[0], 0.0) + seconds
        )
