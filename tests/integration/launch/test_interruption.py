"""What stops a run stops all of it in time, and the same command continues."""

import os
import signal
from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.lock import is_lock_held
from tests.support.interruptions import PHASES, STOP_LIMIT_S, interrupt_in_each
from tests.support.run_files import trained_steps
from tests.support.small_run import SmallRun, await_none_left, started_from

pytestmark = pytest.mark.timeout(600)


def test_an_interrupted_or_orphaned_run_stops_and_completes(model: Path, tmp_path: Path) -> None:
    overrides = (*started_from(model), "trainer.total_steps=2")
    run = SmallRun(tmp_path / "runs", *overrides)
    lose_the_launcher(run, SmallRun(run.fileroot, *overrides))
    interrupt_in_each(run, {"training": PHASES["training"]})
    assert trained_steps(run.paths) >= 1
    run.finish()
    assert [row["step"] for row in read_readable_records(run.paths.metrics)] == [0, 1, 2]
    assert run.processes() == []


def lose_the_launcher(run: SmallRun, other: SmallRun) -> None:
    """Another launcher is refused meanwhile; when the first is killed, the run stops."""
    run.start()
    run.await_true(lambda: is_lock_held(run.paths.lock))
    other.start()
    assert other.wait() == 75
    assert "another process is running this recipe" in other.said()
    run.await_true(lambda: PHASES["first evaluation"](run.paths))
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    await_none_left(run, STOP_LIMIT_S)
