"""What stops a run stops all of it in time, and the same command continues."""

import os
import signal
from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.lock import is_lock_held
from tests.support.interruptions import PHASES, STOP_LIMIT_S
from tests.support.small_run import SmallRun, await_none_left, started_from

pytestmark = pytest.mark.timeout(600)


@pytest.mark.thorough
def test_a_run_whose_launcher_is_killed_stops_and_completes(model: Path, tmp_path: Path) -> None:
    """Ctrl-C in each phase is in tests/acceptance."""
    overrides = (*started_from(model), "trainer.total_steps=2")
    run = SmallRun(tmp_path / "runs", *overrides)
    lose_the_launcher(run, SmallRun(run.fileroot, *overrides))
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
