"""One measurement of `benchmarks.scale`, in a process of its own: `_scale_run SETTINGS RUN_DIR`.

Starts the real ledger as a process, the cells and the trainer as tasks of this one, lets them
run in, and prints what happened in the seconds after that as one JSON object.
"""

import asyncio
import contextlib
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
import yaml

from areal_hpc.jobs.processes.process_setup import raise_open_file_limit
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.files import claim_next_number
from areal_hpc.rundir.paths import RunPaths
from benchmarks._scale_cells import Tally, Tempo, run_cells, run_trainer

ENOUGH_STEPS = 10**6
START_TIMEOUT_S = 60.0
SEALERS = 4
BOUND = 4
"""`max_head_offpolicyness`."""


@dataclass(frozen=True)
class Settings:
    """Settings of one measurement."""

    nodes: int
    batch_size: int
    run_in_s: float
    measured_s: float
    tempo: Tempo


@contextlib.contextmanager
def running_ledger(paths: RunPaths, settings: Settings) -> Iterator[int]:
    """The real ledger of a run directory, as its job starts it; its process id."""
    tempo = settings.tempo
    rollout = {
        "n_samples": tempo.n_samples,
        "max_head_offpolicyness": BOUND,
        "max_concurrent_rollouts": settings.nodes * tempo.tickets_at_once * tempo.n_samples,
    }
    trainer = {"batch_size": settings.batch_size, "total_steps": ENOUGH_STEPS}
    recipe = load_recipe("quickstart").model_copy(
        update={
            "rollout": RolloutConfig.model_validate(rollout),
            "trainer": TrainerConfig.model_validate(trainer),
        }
    )
    paths.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    config = {"run_dir": str(paths.root), "n_train_tasks": 100_000}
    file = paths.root / "ledger.json"
    file.write_text(json.dumps(config))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "areal_hpc.jobs.processes.process_main",
            "areal_hpc.ledger.job:run",
            str(file),
        ],
        env={**os.environ, "AREAL_HPC_SUPERVISOR_PID": str(os.getpid())},
    )
    try:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while rendezvous.find_endpoint(paths.rendezvous_dir, "ledger") is None:
            assert process.poll() is None, "the ledger ended at its start"
            assert time.monotonic() < give_up_at, "the ledger did not start"
            time.sleep(0.05)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def cpu_s(pid: int) -> float:
    """Time on a core so far, of all threads, also those that ended."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def measure(paths: RunPaths, settings: Settings) -> dict[str, Any]:
    """Let everything run, and return the counts after the run-in."""
    tally, ourselves = Tally(), os.getpid()
    with running_ledger(paths, settings) as ledger, ThreadPoolExecutor(SEALERS) as pool:
        cells = asyncio.create_task(run_cells(settings.nodes, paths, settings.tempo, tally, pool))
        trainer = asyncio.create_task(
            run_trainer(paths, settings.batch_size, settings.tempo, tally)
        )
        both = (cells, trainer)
        await asyncio.wait(both, timeout=settings.run_in_s, return_when=asyncio.FIRST_COMPLETED)
        before, began = copy.deepcopy(tally), time.time()
        used = {"ledger": cpu_s(ledger), "cells": cpu_s(ourselves)}
        await asyncio.wait(both, timeout=settings.measured_s, return_when=asyncio.FIRST_COMPLETED)
        ended, wall_s = time.time(), time.time() - began
        used = {
            "ledger": cpu_s(ledger) - used["ledger"],
            "cells": cpu_s(ourselves) - used["cells"],
        }
        seen = {name: getattr(tally, name) - getattr(before, name) for name in COUNTS}
        for task in both:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    return {
        "began": began,
        "ended": ended,
        "wall_s": wall_s,
        "ledger_cpu_s": used["ledger"],
        "cells_cpu_s": used["cells"],
        "manifest_ms": 1e3 * median(tally.manifest_s[len(before.manifest_s) :]),
        "read_ms": 1e3 * median(tally.read_s[len(before.read_s) :]),
        **seen,
    }


COUNTS = ("granted", "settled", "sealed", "steps")


def median(values: Sequence[float]) -> float:
    """0 when there is none."""
    return statistics.median(values) if values else 0.0


def main() -> None:
    given = json.loads(sys.argv[1])
    settings = Settings(**{**given, "tempo": Tempo(**given["tempo"])})
    paths = RunPaths(Path(sys.argv[2]))
    raise_open_file_limit()
    paths.rendezvous_dir.mkdir(parents=True, exist_ok=True)
    rendezvous.ensure_service_key(paths.service_key)
    claim_next_number(paths.generations_dir)
    print(json.dumps(uvloop.run(measure(paths, settings))))


if __name__ == "__main__":
    main()
