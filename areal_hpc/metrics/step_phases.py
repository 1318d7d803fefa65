"""Phases of a trainer's step, and what most of a step's time went to."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

SystemPart = Literal["generation", "training", "weights", "evaluation"]


class StepPhase(NamedTuple):
    name: str
    """As in the metric `time/<name>_s`."""
    system_part: SystemPart
    activity: str


STEP_PHASES = (
    StepPhase("files", "training", "small files"),
    StepPhase("batch_wait", "generation", "waiting for episodes"),
    StepPhase("read", "training", "reading batches"),
    StepPhase("measure", "training", "training"),
    StepPhase("score", "training", "training"),
    StepPhase("pack", "training", "training"),
    StepPhase("train", "training", "training"),
    StepPhase("cell_wait", "generation", "waiting for a replica"),
    StepPhase("publish", "weights", "weight updates"),
    StepPhase("checkpoint", "training", "checkpoints"),
    StepPhase("eval", "evaluation", "evaluation"),
    StepPhase("export", "training", "checkpoints"),
)
"""In the order in which the trainer comes to them."""


def sum_times_by_activity(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by what its phases are spent on; every activity is there."""
    seconds: dict[str, float] = {}
    for phase in STEP_PHASES:
        spent = row.get(f"time/{phase.name}_s") or 0.0
        seconds[phase.activity] = seconds.get(phase.activity, 0.0) + spent
    return seconds


def compute_time_shares_by_system_part(row: Mapping[str, Any]) -> dict[SystemPart, float]:
    step_s = row.get("time/step_s") or 0.0
    if step_s <= 0:
        return {}
    shares: dict[SystemPart, float] = dict.fromkeys(get_args(SystemPart), 0.0)
    for phase in STEP_PHASES:
        shares[phase.system_part] += (row.get(f"time/{phase.name}_s") or 0.0) / step_s
    return shares


def find_step_bottleneck(row: Mapping[str, Any]) -> SystemPart | None:
    shares = compute_time_shares_by_system_part(row)
    if not shares:
        return None
    return max(shares, key=lambda part: shares[part])
