"""A run that an earlier version left: this one resumes it, and accounts for all of it."""

from pathlib import Path

import pytest

from areal_hpc.rundir.checkpoints import find_latest_checkpoint
from areal_hpc.rundir.jsonl import read_readable_records
from tests.support.commands import areal_hpc, said_by
from tests.support.earlier_run import EARLIER_STEPS, unpack_earlier_run

pytestmark = pytest.mark.timeout(400)

STEPS = EARLIER_STEPS + 2
TICKETS = 4
"""A batch of the cut-down quick start."""


def test_a_run_of_an_earlier_version_is_resumed_and_accounted_for(tmp_path: Path) -> None:
    run = unpack_earlier_run(tmp_path, STEPS)
    kept = find_latest_checkpoint(run.paths.checkpoints_dir)
    assert kept is not None
    assert kept.state.step == EARLIER_STEPS
    assert run.audited() == f"trained_once={TICKETS * EARLIER_STEPS} duplicates=0 lost=0 open=0"
    run.finish()
    assert [row["step"] for row in read_readable_records(run.paths.metrics)] == [*range(STEPS + 1)]
    resumed = find_latest_checkpoint(run.paths.checkpoints_dir)
    assert resumed is not None
    assert resumed.state.consumed == [*range(1, STEPS + 1)]
    assert resumed.state.forks[: len(kept.state.forks)] == kept.state.forks, "it began anew"
    assert run.audited() == f"trained_once={TICKETS * STEPS} duplicates=0 lost=0 open=0"
    said_by(areal_hpc("shards", "verify", run.paths.root))
