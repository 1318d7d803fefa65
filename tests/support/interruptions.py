"""Ctrl-C at a phase of a run, and what must hold after it."""

from collections.abc import Callable, Mapping
from functools import partial

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.deadlines import scaled
from tests.support.run_files import trained_steps
from tests.support.small_run import SmallRun

STOP_LIMIT_S = 20.0

Phases = Mapping[str, Callable[[RunPaths], bool]]
"""How to see that a run has come to them, in their order."""


def _evaluates(paths: RunPaths) -> bool:
    endpoints = (paths.rendezvous_dir / f"{name}.json" for name in ("control-cell-0", "ledger"))
    return all(one.exists() for one in endpoints) and any(paths.generations_dir.glob("*"))


PHASES: Phases = {
    "SFT": lambda paths: bool(read_readable_records(paths.sft_metrics)),
    "servers starting": lambda paths: any(paths.logs_dir.glob("latest/cell-0/*.log")),
    "first evaluation": _evaluates,
    "training": lambda paths: trained_steps(paths) >= 1,
}


def interrupt_in_each(run: SmallRun, phases: Phases) -> None:
    """Start the run once a phase and press Ctrl-C in it: it ends in time, and nothing is left."""
    for phase, is_reached in phases.items():
        seconds = run.interrupt_when(partial(is_reached, run.paths))
        assert seconds <= scaled(STOP_LIMIT_S), f"{phase}: {seconds:.1f} s"
        assert run.processes() == [], phase
        for name in ("control-cell-0.json", "ledger.json"):
            (run.paths.rendezvous_dir / name).unlink(missing_ok=True)
