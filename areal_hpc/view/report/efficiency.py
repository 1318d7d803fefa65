"""What a run cost and what for: wall time, GPU-hours, shares of a step, memory, restarts."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_hpc.metrics.step_line import MetricRow, compute_trained_tokens_per_s
from areal_hpc.metrics.step_phases import find_step_bottleneck
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import read_all_events
from areal_hpc.view.answers.step_parts import list_mean_step_parts
from areal_hpc.view.events.failure_events import count_unusual_events
from areal_hpc.view.metric_values import format_value, list_numbers, list_restart_steps
from areal_hpc.view.state.run_state import list_launch_times
from areal_hpc.view.tables import format_duration
from areal_hpc.view.timing.idle_time import describe_idle_time, read_held_resources

MAX_SHOWN_EVENTS = 12


@dataclass(frozen=True, slots=True)
class Efficiency:
    facts: tuple[tuple[str, str], ...]
    step_time_shares: tuple[tuple[str, float], ...]
    unusual_events: tuple[tuple[str, str, int], ...]
    """Events that are not routine: what, by whom, how often."""


def measure_efficiency(paths: RunPaths, rows: Sequence[MetricRow], cell_count: int) -> Efficiency:
    timed = [row for row in rows if row.get("time/step_s")]
    shares: tuple[tuple[str, float], ...] = ()
    if timed:
        step_s = statistics.fmean(list_numbers(timed, "time/step_s"))
        shares = tuple(
            (one.name, one.seconds / step_s) for one in list_mean_step_parts(timed, None)
        )
    events = count_unusual_events(read_all_events(paths.events), MAX_SHOWN_EVENTS)
    return Efficiency(tuple(_list_facts(paths, rows, cell_count)), shares, tuple(events))


def _list_facts(
    paths: RunPaths, rows: Sequence[MetricRow], cell_count: int
) -> Iterator[tuple[str, str]]:
    launches = list_launch_times(paths)
    ends = list_numbers(rows, "unix_time_s")
    steps_s = sum(list_numbers(rows, "time/step_s"))
    if launches and ends:
        wall_s = ends[-1] - launches[0][1]
        yield "wall time", f"{format_duration(wall_s)} from the first launch to the last step"
    if steps_s:
        yield "time of steps", format_duration(steps_s)
    size = read_held_resources(paths, cell_count)
    if size is not None and steps_s:
        held = steps_s / 3600 * (size.trainer + size.cells)
        unit = f"{size.unit}-hours"
        yield unit, f"{held:.2f} while steps were trained"
        for sentence in describe_idle_time(rows, size):
            yield "idle", sentence
    limits = Counter(limit for row in rows if (limit := find_step_bottleneck(row)) is not None)
    if limits:
        told = ", ".join(f"{count} by {limit}" for limit, count in limits.most_common())
        yield "steps limited", told
    yield "launches", str(len(launches) or "not recorded")
    yield "restarts of the trainer survived", str(len(list_restart_steps(rows)))
    tokens = sum(list_numbers(rows, "tokens/trained"))
    if tokens and steps_s:
        speed = compute_trained_tokens_per_s(rows)
        yield "tokens trained", f"{tokens:,.0f}, {speed:.0f} a second over all phases"
    if mfu := list_numbers(rows, "throughput/mfu"):
        yield "model FLOP/s utilization", f"{statistics.fmean(mfu):.1%} while training"
    if memory := list_numbers(rows, "memory/trainer_peak_bytes"):
        peak = format_value("memory/trainer_peak_bytes", max(memory))
        yield "most memory of a rank", peak
    if free := list_numbers(rows, "disk/free_bytes"):
        yield "least room on the storage", format_value("disk/free_bytes", min(free))
    failures = sum(list_numbers(rows, "episode/failures"))
    yield "failed tries of episodes", f"{failures:.0f}"
    dropped = {
        name: sum(list_numbers(rows, f"tickets/{name}"))
        for name in ("failed", "filtered", "stale_dropped", "stale_requeued", "stale_trained")
    }
    given_up = [f"{count:.0f} {name.replace('_', ' ')}" for name, count in dropped.items() if count]
    if given_up:
        yield "tickets", ", ".join(given_up)
