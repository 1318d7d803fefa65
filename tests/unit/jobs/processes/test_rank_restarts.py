"""Notes by which the tasks of a job agree to start their ranks again."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from areal_hpc.jobs.restarts import RankRestart, RankRestartNotes


def test_of_many_that_died_one_is_the_cause_and_all_follow_it(tmp_path: Path) -> None:
    tasks = [RankRestartNotes(tmp_path / "7.0", 0.0) for _ in range(8)]
    assert [task.read_next_restart() for task in tasks] == [None] * 8
    with ThreadPoolExecutor(8) as pool:
        said = [
            pool.submit(task.announce_restart, RankRestart(rank, 137, 1))
            for rank, task in enumerate(tasks)
        ]
    (cause,) = [rank for rank, one in enumerate(said) if one.result()]
    assert [task.read_next_restart() for task in tasks] == [RankRestart(cause, 137, 1)] * 8
    assert [task.read_next_restart() for task in tasks] == [None] * 8, "each is followed once"
    assert tasks[0].announce_restart(RankRestart(0, 139, 2)), "and may be followed by another"
    assert tasks[5].read_next_restart() == RankRestart(0, 139, 2)


def test_another_start_of_the_job_has_notes_of_its_own(tmp_path: Path) -> None:
    assert RankRestartNotes(tmp_path / "7.0", 0.0).announce_restart(RankRestart(0, 137, 1))
    assert RankRestartNotes(tmp_path / "7.1", 0.0).read_next_restart() is None


def test_a_healthy_tasks_storage_is_not_asked_all_the_time(tmp_path: Path) -> None:
    notes = RankRestartNotes(tmp_path, 3600.0)
    assert notes.read_next_restart() is None
    assert notes.announce_restart(RankRestart(1, 137, 1))
    assert notes.read_next_restart() is None, "it looked a moment ago"
    assert notes.read_next_restart(is_urgent=True) == RankRestart(1, 137, 1)
