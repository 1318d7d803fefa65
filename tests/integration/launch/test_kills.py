"""kill -9 at a few telling points; `tests/acceptance/test_kills.py` has them all."""

from pathlib import Path

import pytest

from tests.support.killed_run import Kill, KilledRun
from tests.support.process_commands import find_processes
from tests.support.run_files import events_of
from tests.support.small_run import await_none_left

pytestmark = pytest.mark.timeout(900)


def test_a_run_outlives_proxy_ledger_trainer_and_a_whole_job(model: Path, tmp_path: Path) -> None:
    kills = [Kill("proxy", "seal"), Kill("ledger", "step"), Kill("trainer", "checkpoint")]
    run = KilledRun(tmp_path, model, kills, steps=6)
    run.start()
    run.await_true(lambda: run.struck().keys() == {kill.name for kill in kills})
    supervisors = find_processes("submitit", run.paths.jobs_dir / "trainer")
    assert supervisors
    for process in supervisors:
        process.kill()
    assert run.wait() == 0, run.said()
    run.assert_complete()
    submitted = [event["job"] for event in events_of(run.paths, "job_submitted")]
    assert sorted(submitted) == ["cell-0", "trainer", "trainer"], "ranks start again within a job"
    await_none_left(run, 20.0)
