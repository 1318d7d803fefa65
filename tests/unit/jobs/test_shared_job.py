"""Cells that share a job, seen from the supervisor of one of its tasks."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from areal_hpc.jobs.node.topology import JOB_START_VARIABLE, TaskPosition
from areal_hpc.jobs.shared_job import (
    IDLE_NOTE_MARGIN_S,
    SharedCell,
    get_part_of_task,
    split_exits_by_cell,
)
from areal_hpc.jobs.starts import claim_next_start
from areal_hpc.rundir.jobs import (
    CellSpec,
    JobSpec,
    LaunchFile,
    ProcessSpec,
    SlurmLaunchInfo,
    TaskExit,
    read_task_exit,
    write_task_exit,
)
from areal_hpc.rundir.paths import JobPaths

START = "12.0"
IDLE_S = 600.0
CRASHED, MISTAKEN = TaskExit(139, "driver"), TaskExit(78, "driver")
LEADING = ProcessSpec("driver", "agents", "a:run", {}, tasks="first")
FOLLOWING = msgspec.structs.replace(LEADING, name="follower", tasks="others")


def position_of(rank: int, tasks: int) -> TaskPosition:
    return TaskPosition(rank, tasks, 0, rank)


def job_of(tasks: int) -> JobSpec:
    cells = [CellSpec(name, [LEADING, FOLLOWING]) for name in ("cell-4", "cell-5")]
    return JobSpec("cells-4-5", "agents", [], tasks=tasks, is_task_a_node=True, cells=cells)


def cell_of(folder: Path, rank: int, tasks: int = 2) -> SharedCell:
    """The cell of one task of a job whose files are in `folder`."""
    files = JobPaths(folder / "cells-4-5")
    files.root.mkdir(exist_ok=True)
    progress = str(folder / "metrics.jsonl")
    slurm = SlurmLaunchInfo("", "", "", "", "", "", progress=progress, idle_timeout_s=IDLE_S)
    launch = LaunchFile(job_of(tasks), str(files.root), "", "", {}, slurm=slurm)
    return SharedCell(launch, slurm, position_of(rank, tasks), START)


def test_tasks_work_for_cells_in_order_and_know_their_place_in_them() -> None:
    parts = [get_part_of_task(job_of(4), position_of(rank, 4)) for rank in range(4)]
    assert [part.name for part in parts] == ["cell-4", "cell-4", "cell-5", "cell-5"]
    assert [part.position.rank for part in parts] == [0, 1, 0, 1]
    assert {part.position.num_tasks for part in parts} == {2}
    run = [[process.name for process in part.list_processes_of_task()] for part in parts]
    assert run == [["driver"], ["follower"]] * 2
    lone = JobSpec("trainer", "train", [LEADING, FOLLOWING], tasks=2)
    assert get_part_of_task(lone, position_of(1, 2)).name == "trainer"


def test_exits_are_told_apart_by_cell_and_missing_ones_left_out() -> None:
    exits = {0: TaskExit(0), 2: CRASHED, 3: MISTAKEN}
    assert split_exits_by_cell(job_of(4), exits) == [[TaskExit(0)], [CRASHED, MISTAKEN]]
    assert split_exits_by_cell(JobSpec("t", "train", [], tasks=4), exits) == [[*exits.values()]]


def test_a_cell_is_started_again_while_the_run_makes_progress(tmp_path: Path) -> None:
    cell = cell_of(tmp_path, 0)
    decisions = []
    for grows in (False, True, False, False):
        if grows:
            (tmp_path / "metrics.jsonl").write_text("a step\n")
        decisions.append(cell.count_failure_and_decide_restart(CRASHED))
        cell.mark_started()
    assert decisions == ["restart", "restart", "restart", "fail"]
    assert cell_of(tmp_path, 0).count_failure_and_decide_restart(MISTAKEN) == "fail"


def test_a_job_is_over_when_no_cell_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_hpc.jobs.shared_job.CELL_POLL_S", 0.0)
    first, second = cell_of(tmp_path, 0), cell_of(tmp_path, 1)
    first.report_cell_end(CRASHED)
    assert not first.write_own_end_and_check_job_over()
    write_task_exit(JobPaths(tmp_path / "cells-4-5"), 1, TaskExit(139, incarnation="11.0"))
    assert not first.write_own_end_and_check_job_over(), "that was an earlier start"
    second.report_cell_end(MISTAKEN)
    assert first.write_own_end_and_check_job_over()
    assert not second.write_own_end_and_check_job_over(), "the first task says so"
    left = read_task_exit(JobPaths(tmp_path / "cells-4-5"), 1, START)
    assert left == msgspec.structs.replace(MISTAKEN, incarnation=START, cell="cell-5")
    stopped = TaskExit(143, reason="close to the time limit")
    assert second.choose_reported_exit(stopped) == left, "how the cell ended is not forgotten"
    assert second.choose_reported_exit(TaskExit(0)).exit_code == 0


def test_a_cell_that_spans_nodes_ends_on_all_of_them_and_no_other_does(tmp_path: Path) -> None:
    tasks = [cell_of(tmp_path, rank, 4) for rank in range(4)]
    tasks[1].report_cell_end(CRASHED)
    ends = [tasks[rank].poll_end_of_other_task() for rank in (0, 2, 3)]
    assert ends == [tasks[1].end, None, None]


def test_a_job_is_idle_when_every_cell_said_so_lately_or_is_over(tmp_path: Path) -> None:
    first, second = cell_of(tmp_path, 0), cell_of(tmp_path, 1)
    assert not first.report_idle_and_check_all_idle()
    assert second.report_idle_and_check_all_idle()
    note = JobPaths(tmp_path / "cell-4").idle_note
    long_ago = time.time() - IDLE_S - IDLE_NOTE_MARGIN_S - 1
    os.utime(note, (long_ago, long_ago))
    assert not second.report_idle_and_check_all_idle(), "it had work since"
    first.report_cell_end(CRASHED)
    assert second.report_idle_and_check_all_idle()


def test_an_idle_note_of_an_earlier_start_does_not_count(tmp_path: Path) -> None:
    note = JobPaths(tmp_path / "cell-4").idle_note
    note.parent.mkdir()
    note.write_text("11.0")
    assert not cell_of(tmp_path, 1).report_idle_and_check_all_idle()


def test_starts_of_a_cell_are_counted_whichever_job_it_is_part_of(tmp_path: Path) -> None:
    claim_next_start(JobPaths(tmp_path / "cell-5").starts_dir, "7.0", "n01", "")
    first, leading, following = cell_of(tmp_path, 0), *(cell_of(tmp_path, n, 4) for n in (2, 3))
    assert first.claim_start_and_build_variables("n02") == {JOB_START_VARIABLE: "1"}
    assert leading.claim_start_and_build_variables("n02") == {JOB_START_VARIABLE: "2"}
    assert following.claim_start_and_build_variables("n03") == {}, (
        "the first task of the cell speaks for it"
    )
