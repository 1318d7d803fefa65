"""examples/preemption: a run that is stopped in the middle goes on, and loses nothing."""

from pathlib import Path

import pytest

from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT, python_of
from tests.support.small_run import CUT_DOWN


@pytest.mark.timeout(600)
def test_a_preempted_run_goes_on_and_trains_every_ticket_once(tmp_path: Path) -> None:
    done = run_program(
        *(python_of("main"), "examples/preemption/preempt.py", "recipes/quickstart.yaml"),
        *(f"cluster.fileroot={tmp_path}", *CUT_DOWN),
        environ={"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        timeout_s=None,
    )
    said = said_by(done)
    assert "preempted after step" in said
    assert "went on to step 3" in said
    assert said.splitlines()[-1] == "trained_once=12 duplicates=0 lost=0 open=0"
