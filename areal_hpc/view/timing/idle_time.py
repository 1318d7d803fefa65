"""Idle time of a run's trainer and cells, from what its steps recorded."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_hpc.metrics.step_metrics import BATCH_WAIT_PHASE, CELL_IDLE_S_METRIC, CELL_WAIT_PHASE
from areal_hpc.rundir.jobs import LaunchFile
from areal_hpc.rundir.paths import JobPaths, RunPaths
from areal_hpc.rundir.rendezvous import is_training_cell_job
from areal_hpc.rundir.telemetry.events import CELL_FOUND_EVENT, NO_CELL_EVENT

TRAINER_WAIT_METRICS = tuple(f"time/{phase}_s" for phase in (CELL_WAIT_PHASE, BATCH_WAIT_PHASE))


@dataclass(frozen=True, slots=True)
class HeldResources:
    """What the jobs of a run hold, in GPUs; in nodes if they have none."""

    unit: str
    """`GPU` or `node`."""
    trainer: int
    cells: int
    """All cells together."""
    cell_count: int


def read_held_resources(paths: RunPaths, cell_count: int) -> HeldResources | None:
    """What the jobs hold, by the last launch of each; None if that cannot be read."""
    trainer_gpus = trainer_nodes = 0
    cells: dict[str, tuple[int, int]] = {}
    try:
        folders = (paths.job(folder.name) for folder in paths.jobs_dir.glob("*"))
        jobs = [job for job in folders if job.launch.exists()]
        for job in sorted(jobs, key=lambda job: job.launch.stat().st_mtime):
            spec = msgspec.json.decode(job.launch.read_bytes(), type=LaunchFile).job
            if spec.name == "trainer":
                trainer_gpus, trainer_nodes = spec.tasks * spec.gpus_per_task, _count_nodes(job)
            elif is_training_cell_job(spec.name):
                cells[spec.name] = (spec.tasks * spec.gpus_per_task, _count_nodes(job))
    except (OSError, ValueError, msgspec.DecodeError):  # another user's, or of another version
        return None
    cell_gpus, cell_nodes = (sum(held) for held in zip((0, 0), *cells.values(), strict=True))
    if trainer_gpus + cell_gpus:
        return HeldResources("GPU", trainer_gpus, cell_gpus, cell_count)
    return HeldResources("node", trainer_nodes, cell_nodes, cell_count) if trainer_nodes else None


def _count_nodes(job: JobPaths) -> int:
    text = job.script.read_text() if job.script.exists() else ""
    found = re.search(r"^#SBATCH --nodes=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 1


def describe_idle_time(rows: Sequence[Mapping[str, Any]], held: HeldResources) -> list[str]:
    hours = _sum_hours(rows, "time/step_s")
    waited = _sum_hours(rows, *TRAINER_WAIT_METRICS) * held.trainer
    idle = _sum_hours(rows, CELL_IDLE_S_METRIC) * held.cells
    idle /= max(held.cell_count, 1)
    of_trainer, of_cells = (
        f"{hours * number:.2f} {held.unit}-hours" for number in (held.trainer, held.cells)
    )
    return [
        f"trainer waiting for cells {waited:.2f} of {of_trainer}",
        f"cells waiting for the trainer {idle:.2f} of {of_cells}",
    ]


def _sum_hours(rows: Sequence[Mapping[str, Any]], *names: str) -> float:
    values = (row.get(name) for row in rows for name in names)
    return sum(value for value in values if isinstance(value, int | float)) / 3600


def measure_wait_without_cells_s(events: Sequence[Mapping[str, Any]], now: float) -> float | None:
    """Seconds for which the trainer has waited for any cell; None if it does not wait. Pure."""
    waits = [one for one in events if one.get("event") in (NO_CELL_EVENT, CELL_FOUND_EVENT)]
    if not waits or waits[-1]["event"] == CELL_FOUND_EVENT:
        return None
    return float(now - waits[-1].get("time", now) + waits[-1].get("waited_s", 0.0))
