"""Ctrl-C in every phase of one run, then the same command completes it."""

from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from tests.support.interruptions import PHASES, interrupt_in_each
from tests.support.run_files import trained_steps
from tests.support.small_run import SmallRun

pytestmark = pytest.mark.timeout(600)


def test_ctrl_c_in_every_phase_then_the_run_completes(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "runs")
    interrupt_in_each(run, PHASES)
    assert trained_steps(run.paths) >= 1
    run.finish()
    assert [row["step"] for row in read_readable_records(run.paths.metrics)] == [0, 1, 2, 3]
    assert run.processes() == []
