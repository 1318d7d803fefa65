"""Time of steps by what it was spent on: phases of the trainer, and what it waited for. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.view.answers.wait_split import WaitSplit, split_wait_by_activity
from areal_hpc.view.batch_episodes import BatchEpisode
from areal_hpc.view.metric_values import list_numbers

WAIT_PHASE = "batch_wait"
PHASES_BY_PART = {
    "waiting for a replica": ("cell_wait",),
    "training": ("measure", "pack", "score", "train"),
    "reading batches": ("read",),
    "weight updates": ("publish",),
    "checkpoints": ("checkpoint", "export"),
    "evaluation": ("eval",),
    "small files": ("files",),
}


@dataclass(frozen=True, slots=True)
class StepPart:
    name: str
    seconds: float


def sum_batch_wait_splits(
    rows: Sequence[MetricRow], episodes: Sequence[BatchEpisode]
) -> WaitSplit | None:
    """What episodes did while the trainer waited for their batches; None if it is not known.

    The row's end and length tell when a step began. The wait follows the writing of the row before,
    which is nearly all of the time for small files.
    """
    split = WaitSplit()
    for row in rows:
        own = [one for one in episodes if one.step == row["step"] and one.is_timed]
        ended_at, step_s, wait_s = (
            row.get(name) for name in ("unix_time_s", "time/step_s", "time/batch_wait_s")
        )
        if own and ended_at and step_s and wait_s:
            begin = ended_at - step_s + (row.get("time/files_s") or 0.0)
            split.add(split_wait_by_activity(begin, begin + wait_s, own))
    return split if split.total_s > 0 else None


def list_mean_step_parts(rows: Sequence[MetricRow], wait_split: WaitSplit | None) -> list[StepPart]:
    def mean_of(*phases: str) -> float:
        times = (sum(list_numbers(rows, f"time/{phase}_s")) for phase in phases)
        return sum(times) / len(rows)

    waiting = mean_of(WAIT_PHASE)
    parts = {part: mean_of(*phases) for part, phases in PHASES_BY_PART.items()}
    if wait_split is not None and wait_split.total_s > 0:
        share = waiting / wait_split.total_s
        parts |= {
            "generation": wait_split.generation_s * share,
            "tools": wait_split.outside_calls_s * share,
            "admission": wait_split.no_episode_s * share,
            "sealing": wait_split.sealing_s * share,
        }
    else:
        tools = statistics.fmean(list_numbers(rows, "episode/tool_time_fraction") or [0.0])
        parts |= {"generation": waiting * (1 - tools), "tools": waiting * tools}
    rest = statistics.fmean(list_numbers(rows, "time/step_s")) - sum(parts.values())
    parts["the trainer's other work"] = max(0.0, rest)
    found = [StepPart(name, seconds) for name, seconds in parts.items() if seconds > 0]
    return sorted(found, key=lambda part: -part.seconds) or [StepPart("nothing recorded", 0.0)]
