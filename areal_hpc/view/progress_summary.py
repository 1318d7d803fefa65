"""Progress of a run: last step, speed, last checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import yaml

from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.live_progress import format_metric
from areal_hpc.view.run_state import RunState, read_run_state
from areal_hpc.view.tables import format_duration


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run, from its directory alone."""

    recipe: dict[str, Any]
    snapshot: RunState
    checkpoint_step: int | None
    """None before the first checkpoint."""
    checkpoint_s_ago: float
    metrics_s_ago: float
    """Since the last step was noted; 0 before the first."""

    @property
    def total_steps(self) -> int:
        """The steps that the recipe asks for."""
        return int(self.recipe["trainer"]["total_steps"])

    @property
    def step(self) -> int:
        """The last trained step; 0 before the first."""
        return int(self.snapshot.steps[-1]["step"]) if self.snapshot.steps else 0


def read_run_progress(paths: RunPaths) -> RunProgress:
    """Look at a run without touching it."""
    found = list_checkpoints(paths.checkpoints_dir, problems=[])  # audit tells of damaged ones
    checkpoint = found[-1] if found else None
    now = time.time()
    return RunProgress(
        recipe=yaml.safe_load(paths.recipe.read_text()),
        snapshot=read_run_state(paths),
        checkpoint_step=checkpoint.state.step if checkpoint else None,
        checkpoint_s_ago=now - checkpoint.written_at if checkpoint else 0.0,
        metrics_s_ago=now - paths.metrics.stat().st_mtime if paths.metrics.exists() else 0.0,
    )


def format_run_progress(advance: RunProgress) -> list[str]:
    """Step, speed, staleness and last checkpoint, for people."""
    rows = [row for row in advance.snapshot.steps if "reward/mean" in row]
    lines = [f"  step              {advance.step} of {advance.total_steps}"]
    if rows:
        last = rows[-1]
        lines[0] += f", {format_duration(advance.metrics_s_ago)} ago"
        rate = format_metric(last["throughput/trained_tokens_per_s"], ".0f")
        lines += [
            f"  reward            {format_metric(last['reward/mean'], '.3f')}",
            f"  training phase    {rate} tokens/s",
            f"  staleness         {format_metric(last['staleness/mean'], '.1f')} mean, "
            f"{last['staleness/max']} max",
        ]
    elif advance.snapshot.sft:
        lines.append(f"  SFT               step {advance.snapshot.sft[-1]['step']}")
    if advance.checkpoint_step is None:
        lines.append("  last checkpoint   none yet")
    else:
        lines.append(
            f"  last checkpoint   step {advance.checkpoint_step}, "
            f"{format_duration(advance.checkpoint_s_ago)} ago"
        )
    return lines
