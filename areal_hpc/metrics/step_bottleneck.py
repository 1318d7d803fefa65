"""Time limit of a step: which part of the system the others waited for."""

from collections.abc import Mapping
from typing import Any, Literal

SystemPart = Literal["generation", "training", "weights", "evaluation"]

PHASES_BY_SYSTEM_PART: dict[SystemPart, tuple[str, ...]] = {
    "generation": ("batch_wait", "cell_wait"),
    "training": ("read", "measure", "pack", "score", "train", "checkpoint", "export", "files"),
    "weights": ("publish",),
    "evaluation": ("eval",),
}


def compute_time_shares_by_system_part(row: Mapping[str, Any]) -> dict[SystemPart, float]:
    step_s = row.get("time/step_s") or 0.0
    if step_s <= 0:
        return {}
    return {
        limit: sum(row.get(f"time/{phase}_s") or 0.0 for phase in phases) / step_s
        for limit, phases in PHASES_BY_SYSTEM_PART.items()
    }


def find_step_bottleneck(row: Mapping[str, Any]) -> SystemPart | None:
    shares = compute_time_shares_by_system_part(row)
    if not shares:
        return None
    return max(shares, key=lambda limit: shares[limit])
