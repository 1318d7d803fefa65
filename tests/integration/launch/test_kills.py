"""kill -9 at a few telling points; `tests/acceptance/test_kill_matrix.py` has them all."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.killed_run import Kill, KilledRun
from tests.support.run_files import events_of, trained_steps
from tests.support.small_run import await_none_left

pytestmark = pytest.mark.timeout(900)


def test_a_run_outlives_its_proxy_its_ledger_and_its_trainer(model: Path, tmp_path: Path) -> None:
    kills = [Kill("proxy", "seal"), Kill("ledger", "step"), Kill("trainer", "checkpoint")]
    run = KilledRun(tmp_path, model, kills, steps=10)
    run.run_to_the_end(most_launches=2)
    assert run.struck().keys() == {kill.name for kill in kills}, run.said()
    run.assert_complete()
    await_none_left(run, 20.0)


def submitit_processes(job_dir: Path) -> list[psutil.Process]:
    """The job's supervisors and submitit's own watcher of them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if "submitit" in command and str(job_dir) in command:
            found.append(process)
    return found


def test_a_job_that_is_killed_is_submitted_again(model: Path, tmp_path: Path) -> None:
    run = KilledRun(tmp_path, model, [], steps=4)
    run.start()
    run.await_true(lambda: trained_steps(run.paths) >= 1)
    supervisors = submitit_processes(run.paths.jobs_dir / "cell-0")
    assert supervisors
    for process in supervisors:
        process.kill()
    assert run.wait() == 0, run.said()
    run.assert_complete()
    submitted = [event["job"] for event in events_of(run.paths, "job_submitted")]
    assert submitted == ["trainer", "cell-0", "cell-0"]
    await_none_left(run, 20.0)
