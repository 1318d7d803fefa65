"""Jobs on nodes whose clocks are off: they stop in time, and save first."""

import time
from pathlib import Path

import pytest

from tests.slurm.supervised_jobs import TIME_LIMIT_MIN, SupervisedJob
from tests.support.devclusters import Devcluster
from tests.support.thoroughness import choose

SHIFTED_CLOCK = """
import os, time
if os.environ.get("SLURM_PROCID") == os.environ["SHIFTED_RANK"]:
    own_time = time.time
    time.time = lambda: own_time() + float(os.environ["SHIFT_S"])
"""


def shift_clock(folder: Path, rank: int, by_s: float) -> tuple[str, ...]:
    """Lines of a job's script: every Python of one of its tasks has a clock that is off."""
    (folder / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    path = f"export PYTHONPATH={folder}:$PYTHONPATH"
    return (path, f"export SHIFTED_RANK={rank} SHIFT_S={by_s}")


@pytest.mark.parametrize("by_s", choose([20.0, -20.0], -20.0))
def test_a_task_whose_clock_is_off_saves_when_the_first_one_stops(
    cluster: Devcluster, tmp_path: Path, by_s: float
) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "trainer")
    lines = shift_clock(tmp_path, 1, by_s)
    job.submit("steady", "--partition=priority", "--nodes=2", tasks=2, setup=lines)
    job.awaits_words(2)
    job.run.cancelled_marker.touch()
    job.stop_first_task()
    job.awaits_words(4)
    assert sorted(job.words[2:]) == ["saved 0", "saved 1"]
    job.awaits_state("CANCELLED", "FAILED")


@pytest.mark.thorough
def test_a_first_task_whose_clock_is_behind_stops_before_its_time_limit(
    cluster: Devcluster, tmp_path: Path
) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "trainer")
    lines = shift_clock(tmp_path, 0, -20.0)
    limit = f"--time={TIME_LIMIT_MIN}"
    job.submit("steady", "--partition=priority", "--requeue", limit, setup=lines)
    job.awaits_words(1)
    began_at = time.monotonic()
    job.awaits_words(2)
    # Of the limit, some seconds are for the stop. Slurm looks at limits twice a minute.
    assert time.monotonic() - began_at < 60 * TIME_LIMIT_MIN - 5
    job.awaits(lambda: "began 2" in job.told)
    assert job.told == ["began 1", "saved 0", "began 2"]
    (requeued,) = [row for row in job.events() if row["event"] == "job_requeued"]
    assert requeued["reason"] == "close to the time limit"
