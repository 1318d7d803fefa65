"""Foreground launcher: jobs that end too early, and a run whose leading job is gone."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_hpc.errors import AgentError, ClusterError, JobFailedError, RecipeError
from areal_hpc.launch import run
from areal_hpc.launch.foreground_launcher import (
    LOCAL_RESTART_POLICY,
    job_made_progress,
    read_progress,
)
from areal_hpc.launch.plan import JobStage, plan_run
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jobs import JobSpec, Submission, TaskExit, record_submission, write_task_exit
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from tests.support.environments import CHECKOUT
from tests.support.scripted_slurm import ScriptedSlurm

KILLED, HEALTHY_S = 137, LOCAL_RESTART_POLICY.healthy_s


@pytest.mark.parametrize(
    ("code", "failures", "decision", "of_one_of_several"),
    [
        (KILLED, 0, "restart", "restart"),
        (KILLED, 1, "fail", "continue_without"),
        (AgentError.exit_code, 0, "fail", "fail"),
        (ClusterError.exit_code, 2, "restart", "restart"),
        (ClusterError.exit_code, 3, "fail", "continue_without"),
        (RecipeError.exit_code, 0, "fail", "fail"),
    ],
)
def test_a_crash_must_follow_some_progress_and_one_cell_of_several_can_be_done_without(
    code: int, failures: int, decision: str, of_one_of_several: str
) -> None:
    assert LOCAL_RESTART_POLICY.decide([code], failures) == decision
    assert LOCAL_RESTART_POLICY.decide([code], failures, is_dispensable=True) == of_one_of_several


@pytest.mark.parametrize(
    ("job", "steps_taken", "steps_left", "lived_s", "expected"),
    [
        ("trainer", 1, 5, 1.0, True),
        ("trainer", 0, 5, HEALTHY_S, False),
        ("cell-0", 0, 5, HEALTHY_S, True),
        ("cell-0", 0, 5, 1.0, False),
        ("evaluation", 0, 5, 1.0, True),
        ("evaluation", 0, 0, 1.0, False),
        ("evaluation", 0, 0, HEALTHY_S, True),
    ],
)
def test_a_job_was_of_use_if_the_run_got_further_or_could_do_without_it(
    job: str, steps_taken: int, steps_left: int, lived_s: float, expected: bool
) -> None:
    useful = job_made_progress(job, steps_taken=steps_taken, steps_left=steps_left, lived_s=lived_s)
    assert useful is expected


QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"


def test_each_stage_proceeds_by_its_own_metrics(paths: RunPaths) -> None:
    sft, train = plan_run(load_recipe(QUICKSTART), paths)
    assert (read_progress(sft, paths), read_progress(train, paths)) == (0, -1)
    append_line(paths.sft_metrics, {"step": 1})
    assert read_progress(sft, paths) > 0
    append_line(paths.metrics, {"step": 7})
    assert read_progress(train, paths) == 7


LOOKS_OF_A_CARETAKER = 12


class Reporter:
    """Reporter that shows nothing and calls `at_look` at each look at the run's files."""

    def __init__(self, at_look: Callable[[int], None]) -> None:
        self._at_look = at_look
        self.looks = 0

    def show_progress(self, stage: str) -> None:
        self.looks += 1
        self._at_look(self.looks)

    def print_line(self, line: str) -> None:
        pass


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """Slurm on which job 2, a cell, runs."""
    for name in ("FIRST_QUEUE_POLL_S", "MAX_QUEUE_POLL_S"):
        monkeypatch.setattr(run, name, 0.0)
    monkeypatch.setattr(run, "RUN_FILES_POLL_S", 0.001)
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.list_running("2")
    return slurm


def watch(paths: RunPaths, at_look: Callable[[int], None]) -> None:
    """Watch a run whose trainer was job 1, and whose cell is job 2."""
    for number, name in enumerate(("trainer", "cell-0"), 1):
        record_submission(paths.submissions, Submission(name, str(number), 1, 0.0, ""))
    jobs = (JobSpec("trainer", "train", []), JobSpec("cell-0", "agents", []))
    stage = JobStage("train", jobs[0], jobs[1:], paths.finished_marker)
    run.watch_submitted_run(
        load_recipe(QUICKSTART),
        paths,
        Reporter(at_look),
        threading.Event(),
        lambda recipe, paths, facts: (stage,),
    )


def test_a_leader_that_comes_back_is_waited_for(slurm: ScriptedSlurm, paths: RunPaths) -> None:
    def bring_back_and_finish(look: int) -> None:
        if look == LOOKS_OF_A_CARETAKER:
            record_submission(paths.submissions, Submission("trainer", "8", 1, 0.0, ""))
            slurm.list_running("2", "8")
        elif look == 2 * LOOKS_OF_A_CARETAKER:
            slurm.list_running()
            paths.finished_marker.touch()

    watch(paths, bring_back_and_finish)
    assert paths.finished_marker.exists()


@pytest.mark.parametrize("way", ["alone", "gave up", "cancelled"])
def test_a_lost_leader_is_not_waited_for(slurm: ScriptedSlurm, paths: RunPaths, way: str) -> None:
    if way == "alone":
        slurm.list_running()
    elif way == "cancelled":
        paths.cancelled_marker.touch()
    else:
        paths.job("trainer").root.mkdir(parents=True)
        write_task_exit(paths.job("trainer"), 0, TaskExit(1, "trainer", gave_up=True))
    with pytest.raises(JobFailedError, match="trainer"):
        watch(paths, lambda look: None)
