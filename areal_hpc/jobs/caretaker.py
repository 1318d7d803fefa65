"""Caretaker of a run's jobs under Slurm: submits again what is gone for good.

A job that ends too early has Slurm start it again, under its number, where it can ask. One whose
node never started it, or that Slurm ended or does not requeue, cannot. The caretaker brings it
back, from three homes:

- a process in the first task of each job of the run: that of the leading job looks after all
  others, and while no leading job is there, that of the first cell that runs looks after it;
- a job of one processor behind all others, which Slurm starts when all of them are over, submits
  them, and leaves within seconds;
- `areal-hpc caretaker` on a login node, where jobs may not submit jobs.

A job that Slurm holds since a node could not start it is released, and that node excluded.
"""

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmNotFoundError
from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.jobs.requeue import build_exclude_list, exclude_nodes
from areal_hpc.recipe.base import BaseConfig
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    IDLE_EXIT_CODE,
    LaunchFile,
    SlurmLaunchInfo,
    Submission,
    TaskExit,
    get_latest_submissions,
    read_submissions,
    read_task_exits,
)
from areal_hpc.rundir.lock import claim, is_lock_held
from areal_hpc.rundir.paths import JobPaths, RunPaths
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT, EventLog
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.allocation import expand_node_list
from areal_hpc.slurm.queue import QueuePoller, SlurmJobRecord, is_live_state, query_squeue_of_user
from areal_hpc.slurm.reasons import is_held_after_failed_launch
from areal_hpc.slurm.resubmit import build_caretaker_dependency, submit_job_again
from areal_hpc.slurm.run_jobs import (
    is_job_of_run,
    list_unrecorded_live_jobs,
    was_probably_cancelled_by_person,
)
from areal_hpc.slurm.states import UNKNOWN_STATE, JobPhase, JobState
from areal_hpc.slurm.submit_exactly_once import is_temporary_refusal

log = logging.getLogger(__name__)

POLL_S = 60.0
"""Between two looks. What is missing at two of them is gone."""
WAITING_JOB_POLL_S = 5.0
"""The same in the job that waits behind the others: nothing of the run is left that may move."""
MAX_SUBMISSIONS_WITHOUT_PROGRESS = 3
"""Of one job without progress of the run; then a person has to resume it."""
MAX_JOB_LIFETIME_TO_BLAME_NODE_S = 60.0
"""A job without a word of any task that lived this long has started; its node is not to blame."""
MAX_EXIT_FILE_DELAY_S = 30.0
"""For which a node may not see a file that another has written: storage caches folders."""
SUBMIT_TIMEOUT_S = 600.0

RunOutlook = Literal["over", "unsettled", "at work"]
"""No job of the run is there, and none will be; some are missing, or nobody knows; the rest."""


class StageJobs(BaseConfig):
    """Names of the jobs of a stage."""

    leader: str
    others: tuple[str, ...]
    done_marker: Path
    """When this file exists the stage needs no jobs."""

    @property
    def jobs(self) -> tuple[str, ...]:
        return (self.leader, *self.others)


class CaretakerConfig(ProcessConfig):
    """Configuration of one caretaker."""

    ENTRY = "areal_hpc.jobs.caretaker:run"
    ROLE = "agents"

    job: str
    """The job that this process is part of; `CARETAKER_JOB` outside of those looked after."""
    stages: tuple[StageJobs, ...]
    """What it looks after, in order: a caretaker in a job of the run has that job's stage alone."""
    poll_s: Annotated[float, Field(gt=0)] = POLL_S
    """Seconds between two looks at the queue."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What is known of the newest submission of one job."""

    name: str
    submission: Submission | None
    """None if the job was never submitted."""
    slurm_record: SlurmJobRecord | None
    """As Slurm has it; None if Slurm does not know it."""
    task_exits: tuple[TaskExit, ...]
    """What its tasks said last."""
    is_alive: bool
    cancelled_by_person: bool = False
    is_given_up: bool = False
    """Caretakers have submitted it as often as they do without progress of the run."""

    @property
    def state(self) -> JobState:
        return self.slurm_record.state if self.slurm_record else UNKNOWN_STATE

    @property
    def is_running(self) -> bool:
        return self.state.phase is JobPhase.RUNNING

    @property
    def is_held_after_failed_launch(self) -> bool:
        held = self.slurm_record
        return held is not None and is_held_after_failed_launch(held.reason)

    @property
    def ended_idle(self) -> bool:
        """It gave its nodes back, as the jobs that it works with were not there."""
        codes = {one.exit_code for one in self.task_exits}
        return IDLE_EXIT_CODE in codes and not any(one.is_crash for one in self.task_exits)

    @property
    def reason_to_submit(self) -> str:
        """Why it is to be submitted again, to follow the job's name; empty if it is not."""
        is_decided = self.name != CARETAKER_JOB and any(
            one.exit_code == 0 or one.gave_up for one in self.task_exits
        )
        if self.is_alive or is_decided or self.cancelled_by_person or self.is_given_up:
            return ""
        if self.submission is None:
            return "was never submitted"
        if self.slurm_record is not None and self.state.phase is JobPhase.UNKNOWN:
            return ""  # a newer Slurm has it, in a state that is not known here
        ended_at = (self.slurm_record and self.slurm_record.ended_or_latest_end_at) or 0.0
        if self.state.name == "COMPLETED" and time.time() - ended_at < MAX_EXIT_FILE_DELAY_S:
            return ""  # its tasks may have said that they are done
        return "had released its nodes" if self.ended_idle else self.state.meaning

    @property
    def faulty_node(self) -> str:
        """The node that ended the job before a task said anything; empty for none."""
        queued = self.slurm_record
        has_ended = self.state.name in ("FAILED", "COMPLETED")
        if queued is None or self.task_exits or not queued.nodes or not has_ended:
            return ""
        lived_s = (queued.ended_or_latest_end_at or 0.0) - (queued.started_or_expected_at or 0.0)
        return (
            expand_node_list(queued.nodes)[0] if lived_s < MAX_JOB_LIFETIME_TO_BLAME_NODE_S else ""
        )


def select_jobs_to_watch(
    own_job: str, stages: Sequence[StageJobs], jobs: Mapping[str, JobStatus]
) -> list[str]:
    """Names of the jobs that the caretaker of `own_job` has to look after now, in order. Pure.

    From outside: no stage whose leading job stays away, and no idle job while those that it works
    with wait in the queue.
    """
    waiting_job = [name for name in jobs if name == CARETAKER_JOB]
    if own_job == CARETAKER_JOB:
        found: list[str] = []
        for stage in stages:
            leader = jobs[stage.leader]
            if not (leader.is_alive or leader.reason_to_submit):
                break
            for name in stage.jobs:
                partners = stage.others if name == stage.leader else (stage.leader,)
                is_lonely = not any(jobs[one].is_running for one in partners) and any(
                    jobs[one].is_alive for one in partners
                )
                found += [] if jobs[name].ended_idle and is_lonely else [name]
        return [*found, *waiting_job]
    (stage,) = stages
    if own_job == stage.leader:
        return [*stage.others, *waiting_job]
    leader = jobs[stage.leader]
    if leader.is_alive and not leader.is_held_after_failed_launch:
        return []
    first = next((name for name in stage.others if jobs[name].is_running), "")
    return [stage.leader] if first == own_job else []


class Caretaker:
    """Looks at the run's jobs now and then, and submits what is missing."""

    def __init__(
        self, config: CaretakerConfig, report: Callable[[str], None] = log.warning
    ) -> None:
        self._config = config
        self._report = report
        self._paths = RunPaths(config.run_dir)
        self._queue = QueuePoller()
        self._events = EventLog(self._paths.events, "caretaker")
        self._missing: set[str] = set()
        """Jobs that were missing at the last look."""
        self._refused: dict[str, str] = {}
        """What Slurm said of the jobs that it did not take."""

    def look(self) -> RunOutlook:
        """Submit the jobs that were missing at the last look and are missing still.

        Raises:
            SlurmNotFoundError: Slurm's commands are not installed here.
        """
        try:
            if self._paths.cancelled_marker.exists() or self._paths.finished_marker.exists():
                return "over"
            stages = [one for one in self._config.stages if not one.done_marker.exists()]
            if not stages:
                return "over"
            jobs = self._read_watched_statuses(stages)
            charges = [jobs[name] for name in select_jobs_to_watch(self._config.job, stages, jobs)]
            missing = [job for job in charges if job.reason_to_submit]
            if missing and self._is_launcher_at_work():
                return "unsettled"
            submitted: list[JobStatus] = []
            for job in missing:
                before = _find_leader_before(job.name, stages)
                is_next = not before or jobs[before].is_alive or jobs[before] in submitted
                if job.name in self._missing and is_next and self._submit_again(job, jobs, stages):
                    submitted.append(job)
            self._missing = {job.name for job in missing}
            for job in charges:
                if job.is_held_after_failed_launch:
                    self._release_after_failed_launch(job)
        except SlurmNotFoundError:
            raise
        except (ClusterError, OSError) as error:
            self._report(f"the run's jobs cannot be looked after now: {error}")
            return "unsettled"
        if any(job not in submitted and self._may_be_taken(job) for job in missing):
            return "unsettled"
        is_any_there = any(job.is_alive for job in jobs.values() if job.name != CARETAKER_JOB)
        return "at work" if submitted or is_any_there else "over"

    def _may_be_taken(self, job: JobStatus) -> bool:
        refusal = self._refused.get(job.name, "")
        return not refusal or is_temporary_refusal(refusal)

    def _is_launcher_at_work(self) -> bool:
        with contextlib.suppress(OSError):  # of storage without locks that reach other nodes
            return is_lock_held(self._paths.lock)
        return False

    def _read_watched_statuses(self, stages: Sequence[StageJobs]) -> dict[str, JobStatus]:
        """Statuses of all jobs; of the leading one alone for a cell, as long as that one lives.

        Of a thousand cells each looks once a minute.
        """
        leader = stages[0].leader
        if self._config.job not in (CARETAKER_JOB, leader):
            jobs = self._read_job_statuses([leader])
            if jobs[leader].is_alive and not jobs[leader].is_held_after_failed_launch:
                return jobs
        names = [name for stage in stages for name in stage.jobs]
        was_laid = self._paths.job(CARETAKER_JOB).launch.exists()
        return self._read_job_statuses([*names, *([CARETAKER_JOB] if was_laid else [])])

    def _read_job_statuses(self, names: Sequence[str]) -> dict[str, JobStatus]:
        submissions = read_submissions(self._paths.submissions)
        latest = get_latest_submissions(submissions)
        newest = {name: latest[name] for name in names if name in latest}
        ids = [one.job_id for one in newest.values()]
        snapshot = self._queue.poll(ids).filter_jobs(ids, partial(is_job_of_run, self._paths))
        if snapshot.outage:
            raise ClusterError(snapshot.outage)
        alive = {
            name for name, one in newest.items() if is_live_state(snapshot.get_state(one.job_id))
        }
        if not alive.issuperset(names):  # Slurm is asked once where nothing is missing
            alive |= self._find_jobs_alive_under_other_ids(submissions)
        return {
            name: self._read_status(name, newest.get(name), snapshot.jobs, name in alive)
            for name in names
        }

    def _find_jobs_alive_under_other_ids(self, submissions: list[Submission]) -> set[str]:
        queued = query_squeue_of_user(self._paths.root.stat().st_uid)
        at_work = {
            job.job_id
            for job in queued
            if job.state.phase in (JobPhase.WAITING, JobPhase.RUNNING)
            and is_job_of_run(self._paths, job)
        }
        # Of two that were submitted at the same time the newest may have given way to the other.
        recorded = {one.job for one in submissions if one.job_id in at_work}
        return recorded | {
            one.submission.job for one in list_unrecorded_live_jobs(self._paths, queued)
        }

    def _read_status(
        self,
        job_name: str,
        submission: Submission | None,
        queued_jobs: Mapping[str, SlurmJobRecord],
        is_alive: bool,
    ) -> JobStatus:
        if submission is None:
            return JobStatus(job_name, None, None, (), is_alive)
        files, found = self._paths.job(job_name), queued_jobs.get(submission.job_id)
        exits = read_task_exits(files).values()
        own = tuple(one for one in exits if one.incarnation.rpartition(".")[0] == submission.job_id)
        by_person = self._was_cancelled_by_person(submission, found)
        is_given_up = not is_alive and _count_submissions(files) > MAX_SUBMISSIONS_WITHOUT_PROGRESS
        return JobStatus(job_name, submission, found, own, is_alive, by_person, is_given_up)

    def _was_cancelled_by_person(
        self, submission: Submission, queued: SlurmJobRecord | None
    ) -> bool:
        note = self._paths.job(submission.job).cancelled_id
        is_noted = note.exists() and note.read_text() == submission.job_id
        if queued is None:
            return is_noted
        owner_id = self._paths.root.stat().st_uid
        by_person = was_probably_cancelled_by_person(queued, self._queue, owner_id)
        with contextlib.suppress(OSError):  # on a full disk the next look tries again
            if by_person and not is_noted:
                write_atomic(note, submission.job_id.encode())
            elif is_noted and not by_person:  # accounting knew better later, or it runs again
                note.unlink(missing_ok=True)
        return by_person

    def _submit_again(
        self, job: JobStatus, jobs: Mapping[str, JobStatus], stages: Sequence[StageJobs]
    ) -> bool:
        """Submit a job; one that Slurm does not take keeps no other one from being submitted."""
        try:
            with claim(self._paths.submission_claim, self._claimant) as other_claimant:
                newest = get_latest_submissions(read_submissions(self._paths.submissions))
                # Else somebody else submits it, or has done so since this look.
                if not other_claimant and newest.get(job.name) == job.submission:
                    return self._submit_claimed(job, newest, jobs, stages)
        except SlurmCommandError as refusal:
            self._report(str(refusal))
            reason = refusal.problems[0].message
            is_new = self._refused.get(job.name) != reason
            self._refused[job.name] = reason
            if is_new and job.name != CARETAKER_JOB:  # once, though it is asked every minute
                self._events.record(SUBMISSION_REFUSED_EVENT, job=job.name, reason=reason)
        except OSError as error:
            self._report(f"{job.name} cannot be submitted again now: {error}")
        return False

    @property
    def _claimant(self) -> str:
        return f"the caretaker of {self._config.job} on {socket.gethostname()}"

    def _submit_claimed(
        self,
        job: JobStatus,
        newest: Mapping[str, Submission],
        jobs: Mapping[str, JobStatus],
        stages: Sequence[StageJobs],
    ) -> bool:
        files = self._paths.job(job.name)
        counts_it = job.name != CARETAKER_JOB
        count = _count_submissions(files) + 1
        if counts_it and count > MAX_SUBMISSIONS_WITHOUT_PROGRESS:
            _write_submission_count(files, count)
            reason = f"{job.name} {job.reason_to_submit}"
            self._events.record("job_given_up", job=job.name, by=self._config.job, reason=reason)
            self._report(f"{reason}; after {count - 1} submissions without progress that is all")
            return False
        if job.faulty_node:
            assert job.submission is not None
            reason = f"{job.name} ended there before its first task started"
            exclude_nodes(self._paths, {job.faulty_node: reason}, job.submission.job_id)
        if counts_it:  # on a full disk nothing would bound the submissions: this raises then
            _write_submission_count(files, count - 1)
        submitted = submit_job_again(
            self._paths,
            job.name,
            [
                f"--dependency={_build_dependency(job.name, newest, stages)}",
                *self._build_exclude_options(files),
            ],
            timeout_s=SUBMIT_TIMEOUT_S,
        )
        self._refused.pop(job.name, None)
        if not counts_it:
            self._report(f"a caretaker waits behind the run's jobs as job {submitted}")
            return True
        self._report(f"{job.name} {job.reason_to_submit}; submitted again as job {submitted}")
        self._events.record(
            "job_submitted_again", job=job.name, job_id=submitted, by=self._config.job,
            reason=f"{job.name} {job.reason_to_submit}", excluded=job.faulty_node,
        )  # fmt: skip
        # Not before: what Slurm did not take was no try of the job.
        _write_submission_count(files, count)
        waiting = jobs.get(CARETAKER_JOB)
        if waiting and waiting.submission and waiting.state.phase is JobPhase.WAITING:
            waiting_id = waiting.submission.job_id
            newest = get_latest_submissions(read_submissions(self._paths.submissions))
            dependency = _build_dependency(CARETAKER_JOB, newest, stages)
            scontrol.retry_and_log(
                lambda: scontrol.update_waiting_job(waiting_id, "Dependency", dependency)
            )
        return True

    def _build_exclude_options(self, job: JobPaths) -> list[str]:
        own = re.findall(r"^#SBATCH --exclude=(\S+)", job.script.read_text(), re.MULTILINE)
        by_recipe = _read_slurm_info(job).excluded_by_recipe
        excluded = build_exclude_list(self._paths, by_recipe, ",".join(own))
        return [f"--exclude={excluded}"] if excluded else []

    def submit_waiting_job(self) -> None:
        """Submit the caretaker's job behind the run's jobs, from the one that runs now."""
        newest = get_latest_submissions(read_submissions(self._paths.submissions))
        own = JobStatus(CARETAKER_JOB, newest.get(CARETAKER_JOB), None, (), is_alive=False)
        stages = [one for one in self._config.stages if not one.done_marker.exists()]
        self._submit_again(own, {}, stages)

    def _release_after_failed_launch(self, job: JobStatus) -> None:
        assert job.submission is not None
        files, job_id = self._paths.job(job.name), job.submission.job_id
        count = _count_submissions(files) + 1
        if count > MAX_SUBMISSIONS_WITHOUT_PROGRESS:
            return
        starts = [start for start in self._queue.read_accounting([job_id]) if start.nodes]
        nodes = expand_node_list(starts[-1].nodes) if starts else []
        reasons = scontrol.read_reasons_of_drained_nodes(nodes) if nodes else {}
        culprits = list(reasons) or (nodes if len(nodes) == 1 else [])
        problem = "; ".join(f"{node}: {reasons.get(node, 'the start failed')}" for node in culprits)
        exclude_nodes(self._paths, dict.fromkeys(culprits, problem), job_id)
        _write_submission_count(files, count - 1)  # on a full disk this raises
        if culprits:
            by_recipe, now = _read_slurm_info(files), scontrol.query_job(job_id).excluded_nodes
            excluded = build_exclude_list(self._paths, by_recipe.excluded_by_recipe, now)
            scontrol.update_waiting_job(job_id, "ExcNodeList", excluded)
        scontrol.control_job("release", job_id)
        _write_submission_count(files, count)
        self._events.record(
            "job_released", job=job.name, job_id=job_id, by=self._config.job, excluded=culprits,
            reason=f"{job.name} could not be started ({problem or 'Slurm names no node'})",
        )  # fmt: skip
        self._report(f"{job.name} (job {job_id}) was held and is released: {problem}")


def _build_dependency(
    job_name: str, newest: Mapping[str, Submission], stages: Sequence[StageJobs]
) -> str:
    """What a job that is submitted again waits for; its script's own conditions have been met."""
    if job_name == CARETAKER_JOB:
        names = [name for stage in stages for name in stage.jobs if name in newest]
        ids = {name: newest[name].job_id for name in names}
        return build_caretaker_dependency(ids.pop(stages[-1].leader, ""), list(ids.values()))
    before = _find_leader_before(job_name, stages)
    return f"afterok:{newest[before].job_id}" if before else ""


def _find_leader_before(job_name: str, stages: Sequence[StageJobs]) -> str:
    """The leading job of the stage that a job waits for; empty for none."""
    found = (before.leader for before, stage in pairwise(stages) if job_name in stage.jobs)
    return next(found, "")


def _read_launch_file(job: JobPaths) -> LaunchFile:
    return msgspec.json.decode(job.launch.read_bytes(), type=LaunchFile)


def _read_slurm_info(job: JobPaths) -> SlurmLaunchInfo:
    info = _read_launch_file(job).slurm
    assert info is not None
    return info


def _read_progress_bytes(job: JobPaths) -> int:
    with contextlib.suppress(OSError):
        progress = _read_slurm_info(job).progress
        return Path(progress).stat().st_size if progress else 0
    return 0


def _count_submissions(job: JobPaths) -> int:
    """Submissions by caretakers since the run made progress."""
    with contextlib.suppress(FileNotFoundError):
        before = msgspec.json.decode(
            job.caretaker_submission_count.read_bytes(), type=dict[str, int]
        )
        is_current = before["progress_bytes"] == _read_progress_bytes(job)
        return before["submissions"] if is_current else 0
    return 0


def _write_submission_count(job: JobPaths, count: int) -> None:
    content = {"submissions": count, "progress_bytes": _read_progress_bytes(job)}
    write_atomic(job.caretaker_submission_count, msgspec.json.encode(content))


def run(config: dict[str, Any]) -> None:
    """Look after the run's jobs until this job ends, or behind them until they are back."""
    told = CaretakerConfig.model_validate(config)
    caretaker = Caretaker(told)
    try:
        if told.job == CARETAKER_JOB:
            while (outlook := caretaker.look()) == "unsettled":
                time.sleep(told.poll_s)
            if outlook == "at work":
                caretaker.submit_waiting_job()
            return
        while True:
            time.sleep(told.poll_s)
            caretaker.look()
    except SlurmNotFoundError as error:
        log.warning("nobody looks after the run's jobs from here: %s", error)


def look_after_run(paths: RunPaths, report: Callable[[str], None], poll_s: float = POLL_S) -> None:
    """Look after a run's jobs from a login node, until it is finished, cancelled or given up.

    Raises:
        ClusterError: The run was not submitted, or there is no Slurm here.
    """
    try:
        (process,) = _read_launch_file(paths.job(CARETAKER_JOB)).job.processes
    except FileNotFoundError as error:
        raise ClusterError(
            "this run has no Slurm jobs",
            key=str(paths.root),
            hint="areal-hpc submit RECIPE, then this command",
        ) from error
    config = CaretakerConfig.model_validate(process.config | {"run_dir": str(paths.root)})
    caretaker = Caretaker(config, report)
    while caretaker.look() != "over":
        time.sleep(poll_s)
