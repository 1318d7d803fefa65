"""The quick start on four nodes learns though Slurm preempts a cell and then the trainer."""

import time
from pathlib import Path

import pytest

from tests.acceptance.slurm_run import SlurmRun
from tests.support.devclusters import devcluster
from tests.support.slurm_events_table import record

pytestmark = pytest.mark.timeout(5400)

NODES = 5
GRACE_S = 45
LEARNING_TIMEOUT_S = 3600.0
PREEMPTED_AT = {"cell-1": 5, "trainer": 12}
"""Job, and the step from which on it is preempted."""


def test_the_quick_start_learns_though_it_is_preempted_twice(tmp_path: Path) -> None:
    began = time.time()
    place = tmp_path / "state"
    with devcluster(
        place, f"--nodes={NODES}", f"--grace-s={GRACE_S}", "--timeout-s=100"
    ) as cluster:
        run = SlurmRun(cluster, tmp_path)
        run.submit_as_shipped()
        for job, step in PREEMPTED_AT.items():
            run.await_true(lambda step=step: run.version.step >= step)  # type: ignore[misc]
            run.preempt(job)
            run.await_true(lambda job=job: run.starts(job) == 2)  # type: ignore[misc]
        run.await_true(run.paths.finished_marker.exists, LEARNING_TIMEOUT_S)
        rewards = [reward for _, reward in run.judged()]
        restarts = {job: run.restarts(job) for job in PREEMPTED_AT}
        took = {"start": rewards[0], "end": rewards[-1], "wall_s": round(time.time() - began)}
        record("preempted", took | {"restarts": restarts, "audit": run.audited()})
        cluster.cancel_all()
    assert restarts == dict.fromkeys(PREEMPTED_AT, 1)
    assert rewards[0] <= 0.45
    assert rewards[-1] >= 0.95
