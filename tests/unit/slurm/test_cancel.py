"""`cancel` ends jobs while Slurm answers, and waits while it does not."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from areal_hpc.cli.operate import STOP_MARGIN_S
from areal_hpc.errors import ClusterError, SlurmTimeoutError
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jobs import (
    Submission,
    is_cancelled,
    is_cancelled_without_checkpoint,
    record_submission,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.run_jobs import KILL_TIMEOUT_S, cancel_jobs
from tests.support.commands import exit_code_of
from tests.support.environments import CHECKOUT
from tests.support.scripted_slurm import ScriptedSlurm

GRACE_S = 20.0
SHOW_JOB = 'if [ -s $STATE ]; then echo "7|$(cat $STATE)|None|n01|N/A|N/A|0|0|||"; fi'
END_IF_TERMINATED = 'case "$*" in *TERM*) : > $STATE;; esac'
SILENT_AT_FIRST = "[ $(grep -c ^scancel $CALLS) -gt 4 ] || { echo Socket timed out >&2; exit 1; }"


class Clock:
    """Stand-in for `time`, which passes when the code sleeps or a question takes long."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("areal_hpc.slurm.run_jobs.time", clock)
    return clock


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.state = "RUNNING"
    slurm.answer("squeue", SHOW_JOB)
    slurm.answer("sacct", "exit 1")
    return slurm


class Questions:
    """Question for the jobs' ids, which gets no answer at some calls."""

    def __init__(
        self, clock: Clock, *unanswered: int, took_s: float = 15.0, answered_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._unanswered = unanswered
        self._took_s = took_s
        self._answered_s = answered_s
        self.asked = 0

    def ask(self) -> Sequence[str]:
        self.asked += 1
        if self.asked in self._unanswered:
            self._clock.sleep(self._took_s)
            raise SlurmTimeoutError("squeue did not respond")
        self._clock.sleep(self._answered_s)
        return ("7",)


def cancel_job(questions: Questions, lines: list[str]) -> int:
    return cancel_jobs(
        questions.ask, is_own=lambda _: True, grace_s=GRACE_S, print_line=lines.append
    )


def test_an_outage_is_no_part_of_the_grace(slurm: ScriptedSlurm, clock: Clock) -> None:
    """Slurm answers once, and then not for longer than grace and kill may take together."""
    lines: list[str] = []
    slurm.answer("scancel", END_IF_TERMINATED)
    first_terms = Questions(clock, *range(1, 4), took_s=KILL_TIMEOUT_S)
    assert cancel_job(first_terms, lines) == 1
    assert slurm.list_calls("scancel") == ["scancel --signal=TERM 7"]
    slurm.state = "RUNNING"
    slurm.answer("scancel", "true")
    later = Questions(clock, *range(2, 4), took_s=KILL_TIMEOUT_S)
    with pytest.raises(ClusterError, match="1 jobs are still running"):
        cancel_job(later, lines)
    calls = slurm.list_calls("scancel")[1:]
    assert calls[0] == "scancel --signal=TERM 7"
    assert "scancel 7" in calls, "what does not end by itself is cancelled before it is reported"


def test_a_lost_signal_is_sent_again_before_any_scancel(slurm: ScriptedSlurm, clock: Clock) -> None:
    """Each time Slurm takes a third of the grace to say which jobs there are."""
    slurm.answer("scancel", f"{SILENT_AT_FIRST}\n{END_IF_TERMINATED}")
    lines: list[str] = []
    assert cancel_job(Questions(clock, answered_s=GRACE_S / 3), lines) == 1
    assert slurm.list_calls("scancel") == ["scancel --signal=TERM 7"] * 5
    assert sum("has not responded" in line for line in lines) == 4
    assert sum("sent SIGTERM" in line for line in lines) == 1


def test_silence_at_the_very_last_look_is_waited_out(slurm: ScriptedSlurm, clock: Clock) -> None:
    slurm.answer("scancel", END_IF_TERMINATED)
    lines: list[str] = []
    questions = Questions(clock, 3)  # the second of the look that finds no job
    assert cancel_job(questions, lines) == 1
    assert questions.asked == 5
    slurm.state = "RUNNING"
    with pytest.raises(ClusterError, match="Slurm has not responded for"):
        cancel_job(Questions(clock, *range(3, 1000)), lines)
    assert lines[-1] == "jobs that Slurm listed last: none"
    with pytest.raises(ClusterError, match="Slurm has not responded for"):
        cancel_job(Questions(clock, *range(1, 1000)), lines)
    assert lines[-1] == "Slurm has not listed the jobs yet"


def make_run(root: Path) -> RunPaths:
    """Make a run whose trainer is job 7 and took long for its last save."""
    paths = RunPaths(root / "quickstart" / "one")
    paths.job("trainer").root.mkdir(parents=True)
    recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", ["cluster.stop_grace_s=12"])
    paths.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    record_submission(paths.submissions, Submission("trainer", "7", 1, 0.0, ""))
    paths.job("trainer").checkpoint_duration.write_text("90.0")
    return paths


@pytest.mark.usefixtures("clock")
def test_the_command_waits_as_long_as_jobs_give_themselves(
    slurm: ScriptedSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = make_run(tmp_path)
    slurm.answer("scancel", END_IF_TERMINATED)
    assert exit_code_of("cancel", paths.root) == 0
    expected_s = 12 + 90 + STOP_MARGIN_S
    assert f"waiting {expected_s:.0f} s for their checkpoints" in capsys.readouterr().out
    assert slurm.list_calls("scancel") == ["scancel --signal=TERM 7"]
    assert is_cancelled(paths.cancelled_marker)
    assert not is_cancelled_without_checkpoint(paths.cancelled_marker)


@pytest.mark.usefixtures("clock")
def test_with_now_jobs_are_cancelled_and_save_nothing(slurm: ScriptedSlurm, tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    slurm.answer("scancel", ": > $STATE")
    assert exit_code_of("cancel", paths.root, "--now") == 0
    assert slurm.list_calls("scancel") == ["scancel 7"]
    assert is_cancelled_without_checkpoint(paths.cancelled_marker)
