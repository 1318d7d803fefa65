"""examples/preemption: a run that is stopped in the middle goes on, and loses nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.environments import CHECKOUT, python_of
from tests.support.small_run import CUT_DOWN


@pytest.mark.timeout(600)
def test_a_preempted_run_goes_on_and_trains_every_ticket_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(python_of("agents"), "examples/preemption/preempt.py", "recipes/quickstart.yaml"),
            *(f"cluster.fileroot={tmp_path}", *CUT_DOWN),
        ],
        cwd=CHECKOUT,
        env={"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preempted after step" in done.stdout
    assert "went on to step 3" in done.stdout
    assert done.stdout.splitlines()[-1] == "trained_once=12 duplicates=0 lost=0 open=0"
