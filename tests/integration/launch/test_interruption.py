"""Ctrl-C: everything stops in time, nothing is left, the same command continues.

`tests/acceptance/test_interruption.py` presses it in every phase.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_lines
from tests.support.interruptions import PHASES, STOP_LIMIT_S, interrupt_in_each
from tests.support.run_files import trained_steps
from tests.support.small_run import SmallRun, await_none_left, started_from

pytestmark = pytest.mark.timeout(600)


def test_ctrl_c_at_a_start_and_in_training_then_the_run_completes(
    model: Path, tmp_path: Path
) -> None:
    run = SmallRun(tmp_path / "runs", *started_from(model))
    interrupt_in_each(run, {phase: PHASES[phase] for phase in ("servers starting", "training")})
    assert trained_steps(run.paths) >= 1
    run.finish()
    assert [row["step"] for row in read_lines(run.paths.metrics)] == [0, 1, 2, 3]
    assert run.processes() == []


def test_a_second_launcher_is_refused_and_killing_the_first_stops_the_run(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "runs")
    run.start()
    run.await_true(lambda: PHASES["SFT"](run.paths))
    other = SmallRun(tmp_path / "runs")
    other.start()
    assert other.wait() == 75
    assert "another process is running this recipe" in other.said()
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    await_none_left(run, STOP_LIMIT_S)
