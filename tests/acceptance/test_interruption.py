"""Ctrl-C in every phase of a run, and kill -9 of its launcher: the same command completes it."""

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.lock import is_lock_held
from areal_hpc.rundir.paths import RunPaths
from tests.support.deadlines import scaled
from tests.support.run_files import trained_steps
from tests.support.small_run import SmallRun, await_none_left

pytestmark = pytest.mark.timeout(600)

STOP_LIMIT_S = 20.0


def evaluates(paths: RunPaths) -> bool:
    endpoints = (paths.rendezvous_dir / f"{name}.json" for name in ("control-cell-0", "ledger"))
    return all(one.exists() for one in endpoints) and any(paths.generations_dir.glob("*"))


PHASES: Mapping[str, Callable[[RunPaths], bool]] = {
    "SFT": lambda paths: bool(read_readable_records(paths.sft_metrics)),
    "servers starting": lambda paths: any(paths.logs_dir.glob("latest/cell-0/*.log")),
    "first evaluation": evaluates,
    "training": lambda paths: trained_steps(paths) >= 1,
}
"""How to see that a run has come to them."""


def test_ctrl_c_in_every_phase_and_a_killed_launcher_then_the_run_completes(
    tmp_path: Path,
) -> None:
    run, other = (SmallRun(tmp_path / "runs") for _ in range(2))
    for phase in ("SFT", "servers starting", "first evaluation"):
        interrupt_in(run, phase)
    lose_the_launcher(run, other)
    interrupt_in(run, "training")
    assert trained_steps(run.paths) >= 1
    run.finish()
    assert [row["step"] for row in read_readable_records(run.paths.metrics)] == [0, 1, 2, 3]
    assert run.processes() == []


def interrupt_in(run: SmallRun, phase: str) -> None:
    """Press Ctrl-C in a phase: the run ends in time, and nothing is left."""
    seconds = run.interrupt_when(partial(PHASES[phase], run.paths))
    assert seconds <= scaled(STOP_LIMIT_S), f"{phase}: {seconds:.1f} s"
    assert run.processes() == [], phase
    for name in ("control-cell-0.json", "ledger.json"):
        (run.paths.rendezvous_dir / name).unlink(missing_ok=True)


def lose_the_launcher(run: SmallRun, other: SmallRun) -> None:
    """Another launcher is refused meanwhile; when the first is killed, the run stops."""
    run.start()
    run.await_true(lambda: is_lock_held(run.paths.lock))
    other.start()
    assert other.wait() == 75
    assert "another process is running this recipe" in other.said()
    run.await_true(lambda: evaluates(run.paths))
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    await_none_left(run, STOP_LIMIT_S)
