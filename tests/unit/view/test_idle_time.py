"""Idle hours of trainer and cells, from what a run's steps and events recorded."""

from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.rundir.jobs import JobSpec, LaunchFile
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.timing.idle_time import (
    HeldResources,
    describe_idle_time,
    measure_wait_without_cells_s,
    read_held_resources,
)


def write_job(paths: RunPaths, name: str, tasks: int, gpus: int, nodes: int | None) -> None:
    job = paths.job(name)
    job.root.mkdir(parents=True)
    spec = JobSpec(name, "agents", [], tasks=tasks, gpus_per_task=gpus)
    job.launch.write_bytes(msgspec.json.encode(LaunchFile(spec, "", "", "", {})))
    if nodes is not None:
        job.script.write_text(f"#!/bin/bash\n#SBATCH --nodes={nodes}\n")


def test_what_a_run_holds_is_counted_in_gpus_or_else_in_nodes(tmp_path: Path) -> None:
    assert read_held_resources(RunPaths(tmp_path), 2) is None
    for gpus, expected in (
        (0, HeldResources("node", 4, 2, 2)),
        (2, HeldResources("GPU", 16, 4, 2)),
    ):
        paths = RunPaths(tmp_path / str(gpus))
        write_job(paths, "sft", 8, gpus, 4)
        write_job(paths, "trainer", 8, gpus, 4)
        write_job(paths, "cell-0", 1, gpus, 1)
        write_job(paths, "cell-1", 1, gpus, None)
        assert read_held_resources(paths, 2) == expected


def test_hours_are_those_that_each_side_waited_for_the_other() -> None:
    rows: list[dict[str, Any]] = [
        {"time/step_s": 1800.0, "time/batch_wait_s": 600.0, "time/cell_wait_s": 300.0},
        {"time/step_s": 1800.0, "time/batch_wait_s": None, "cells/idle_s": 1800.0},
        {"step": 3, "eval/reward": 0.5},
    ]
    assert describe_idle_time(rows, HeldResources("GPU", 8, 4, 2)) == [
        "trainer waiting for cells 2.00 of 8.00 GPU-hours",
        "cells waiting for the trainer 1.00 of 4.00 GPU-hours",
    ]


def test_a_trainer_without_any_cell_waits_until_one_is_found() -> None:
    wait = {"time": 1000.0, "event": "no_cell", "waited_s": 60.0}
    found = {"time": 1500.0, "event": "cell_found", "waited_s": 560.0}
    assert measure_wait_without_cells_s([], 2000.0) is None
    assert measure_wait_without_cells_s([found, wait], 1100.0) == 160.0
    assert measure_wait_without_cells_s([wait, found], 2000.0) is None
