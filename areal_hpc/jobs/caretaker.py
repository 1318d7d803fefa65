"""Caretaker of a run's jobs under Slurm: it submits jobs again that are gone for good.

A job that ends too early normally requeues itself under its id. A job cannot do so if its node
never started it, or if Slurm ended it or does not requeue it. The caretaker submits such jobs
again. It runs in three places:

- as a process in the first task of each job of the run: the leading job's caretaker watches all
  other jobs, and while there is no leading job, that of the first running cell watches for it;
- as a job of one processor behind all others: Slurm starts it when all of them are over, and it
  submits them and ends within seconds;
- as `areal-hpc caretaker` on a login node, where jobs may not submit jobs.

The caretaker releases a job that Slurm holds after a failed start, and excludes the node.
"""

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmNotFoundError
from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.jobs.job_status import (
    MAX_SUBMISSIONS_WITHOUT_PROGRESS,
    JobStatus,
    JobStatusReader,
    StageJobs,
    count_submissions,
    read_slurm_info,
    select_jobs_to_watch,
    write_submission_count,
)
from areal_hpc.jobs.requeue import build_exclude_list, exclude_nodes
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    Submission,
    get_latest_submissions,
    read_launch_file,
    read_submissions,
)
from areal_hpc.rundir.lock import claim, is_lock_held
from areal_hpc.rundir.paths import JobPaths, RunPaths
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT, EventLog
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.scontrol import expand_node_list
from areal_hpc.slurm.script_submission import (
    build_caretaker_dependency,
    is_temporary_refusal,
    submit_job_again,
)
from areal_hpc.slurm.states import JobPhase

log = logging.getLogger(__name__)

POLL_S = 60.0
"""Time between two looks. A job that two looks miss is gone."""
WAITING_JOB_POLL_S = 5.0
"""Time between two looks of the waiting job, when all jobs of the run are over."""
SUBMIT_TIMEOUT_S = 600.0

RunOutlook = Literal["over", "unsettled", "at work"]
"""`over`: no job of the run is left or comes back; `unsettled`: jobs are missing, or their state is
unknown; `at work`: all other states."""


class CaretakerConfig(ProcessConfig):
    ENTRY = "areal_hpc.jobs.caretaker:run"
    ROLE = "agents"

    job: str
    """Job that this process belongs to; `CARETAKER_JOB` outside the watched jobs."""
    stages: tuple[StageJobs, ...]
    """Stages to watch, in order; a caretaker in a job of the run watches only that job's stage."""
    poll_s: Annotated[float, Field(gt=0)] = POLL_S
    """Time between two looks at the queue in seconds."""


class Caretaker:
    """Watcher of a run's jobs, which submits missing ones again."""

    def __init__(
        self, config: CaretakerConfig, report: Callable[[str], None] = log.warning
    ) -> None:
        self._config = config
        self._report = report
        self._paths = RunPaths(config.run_dir)
        self._statuses = JobStatusReader(self._paths)
        self._events = EventLog(self._paths.events, "caretaker")
        self._missing: set[str] = set()
        """Jobs that were missing at the last look."""
        self._refused: dict[str, str] = {}
        """Slurm's reasons for the jobs that it refused."""

    def look(self) -> RunOutlook:
        """Submit jobs that are missing now and were missing at the last look.

        Raises:
            SlurmNotFoundError: Slurm's commands are not installed on this node.
        """
        try:
            if self._paths.cancelled_marker.exists() or self._paths.finished_marker.exists():
                return "over"
            stages = [stage for stage in self._config.stages if not stage.done_marker.exists()]
            if not stages:
                return "over"
            jobs = self._read_watched_statuses(stages)
            watched = [jobs[name] for name in select_jobs_to_watch(self._config.job, stages, jobs)]
            missing = [job for job in watched if job.reason_to_submit]
            if missing and self._is_launcher_at_work():
                return "unsettled"
            submitted: list[JobStatus] = []
            for job in missing:
                before = _find_leader_before(job.name, stages)
                is_next = not before or jobs[before].is_alive or jobs[before] in submitted
                if job.name in self._missing and is_next and self._submit_again(job, jobs, stages):
                    submitted.append(job)
            self._missing = {job.name for job in missing}
            for job in watched:
                if job.is_held_after_failed_launch:
                    self._release_after_failed_launch(job)
        except SlurmNotFoundError:
            raise
        except (ClusterError, OSError) as error:
            self._report(f"the run's jobs cannot be watched now: {error}")
            return "unsettled"
        if any(job not in submitted and self._may_be_taken(job) for job in missing):
            return "unsettled"
        is_any_there = any(job.is_alive for job in jobs.values() if job.name != CARETAKER_JOB)
        return "at work" if submitted or is_any_there else "over"

    def _may_be_taken(self, job: JobStatus) -> bool:
        refusal = self._refused.get(job.name, "")
        return not refusal or is_temporary_refusal(refusal)

    def _is_launcher_at_work(self) -> bool:
        with contextlib.suppress(OSError):  # storage whose locks do not reach other nodes
            return is_lock_held(self._paths.lock)
        return False

    def _read_watched_statuses(self, stages: Sequence[StageJobs]) -> dict[str, JobStatus]:
        """Read the statuses of all jobs; in a cell, of the leading job alone as long as it lives.

        A run may have a thousand cells, each of which looks once a minute.
        """
        leader = stages[0].leader
        if self._config.job not in (CARETAKER_JOB, leader):
            jobs = self._statuses.read([leader])
            if jobs[leader].is_alive and not jobs[leader].is_held_after_failed_launch:
                return jobs
        names = [name for stage in stages for name in stage.jobs]
        has_waiting_job = self._paths.job(CARETAKER_JOB).launch.exists()
        return self._statuses.read([*names, *([CARETAKER_JOB] if has_waiting_job else [])])

    def _submit_again(
        self, job: JobStatus, jobs: Mapping[str, JobStatus], stages: Sequence[StageJobs]
    ) -> bool:
        """Submit a job; return False, so that others are still submitted, if Slurm refuses it."""
        try:
            with claim(self._paths.submission_claim, self._claimant) as other_claimant:
                newest = get_latest_submissions(read_submissions(self._paths.submissions))
                # Else another process submits it, or has done so since this look.
                if not other_claimant and newest.get(job.name) == job.submission:
                    return self._submit_claimed(job, newest, jobs, stages)
        except SlurmCommandError as refusal:
            self._report(str(refusal))
            reason = refusal.problems[0].message
            is_new = self._refused.get(job.name) != reason
            self._refused[job.name] = reason
            if is_new and job.name != CARETAKER_JOB:  # once, not at each look
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
        is_counted = job.name != CARETAKER_JOB
        count = count_submissions(files) + 1
        if is_counted and count > MAX_SUBMISSIONS_WITHOUT_PROGRESS:
            write_submission_count(files, count)
            reason = f"{job.name} {job.reason_to_submit}"
            self._events.record("job_given_up", job=job.name, by=self._config.job, reason=reason)
            self._report(f"{reason}; given up after {count - 1} submissions without progress")
            return False
        if job.faulty_node:
            assert job.submission is not None
            reason = f"{job.name} ended there before its first task started"
            exclude_nodes(self._paths, {job.faulty_node: reason}, job.submission.job_id)
        if is_counted:  # raises on a full disk, where nothing would bound the submissions
            write_submission_count(files, count - 1)
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
        if not is_counted:
            self._report(f"a caretaker waits behind the run's jobs as job {submitted}")
            return True
        self._report(f"{job.name} {job.reason_to_submit}; submitted again as job {submitted}")
        self._events.record(
            "job_submitted_again", job=job.name, job_id=submitted, by=self._config.job,
            reason=f"{job.name} {job.reason_to_submit}", excluded=job.faulty_node,
        )  # fmt: skip
        # Counted only now: a refused submission was no try of the job.
        write_submission_count(files, count)
        waiting = jobs.get(CARETAKER_JOB)
        if waiting and waiting.submission and waiting.state.phase is JobPhase.WAITING:
            waiting_id = waiting.submission.job_id
            newest = get_latest_submissions(read_submissions(self._paths.submissions))
            dependency = _build_dependency(CARETAKER_JOB, newest, stages)
            scontrol.retry_command(
                lambda: scontrol.update_waiting_job(waiting_id, "Dependency", dependency)
            )
        return True

    def _build_exclude_options(self, job: JobPaths) -> list[str]:
        own = re.findall(r"^#SBATCH --exclude=(\S+)", job.script.read_text(), re.MULTILINE)
        by_recipe = read_slurm_info(job).excluded_by_recipe
        excluded = build_exclude_list(self._paths, by_recipe, ",".join(own))
        return [f"--exclude={excluded}"] if excluded else []

    def submit_waiting_job(self) -> None:
        """Submit the next caretaker's job behind the run's jobs, from the one that runs now."""
        newest = get_latest_submissions(read_submissions(self._paths.submissions))
        own = JobStatus(CARETAKER_JOB, newest.get(CARETAKER_JOB), None, (), is_alive=False)
        stages = [stage for stage in self._config.stages if not stage.done_marker.exists()]
        self._submit_again(own, {}, stages)

    def _release_after_failed_launch(self, job: JobStatus) -> None:
        assert job.submission is not None
        files, job_id = self._paths.job(job.name), job.submission.job_id
        count = count_submissions(files) + 1
        if count > MAX_SUBMISSIONS_WITHOUT_PROGRESS:
            return
        starts = [start for start in self._statuses.queue.read_accounting([job_id]) if start.nodes]
        nodes = expand_node_list(starts[-1].nodes) if starts else []
        reasons = scontrol.read_drain_reasons(nodes) if nodes else {}
        culprits = list(reasons) or (nodes if len(nodes) == 1 else [])
        problem = "; ".join(f"{node}: {reasons.get(node, 'the start failed')}" for node in culprits)
        exclude_nodes(self._paths, dict.fromkeys(culprits, problem), job_id)
        write_submission_count(files, count - 1)  # raises on a full disk
        if culprits:
            by_recipe, now = read_slurm_info(files), scontrol.query_job(job_id).excluded_nodes
            excluded = build_exclude_list(self._paths, by_recipe.excluded_by_recipe, now)
            scontrol.update_waiting_job(job_id, "ExcNodeList", excluded)
        scontrol.control_job("release", job_id)
        write_submission_count(files, count)
        self._events.record(
            "job_released", job=job.name, job_id=job_id, by=self._config.job, excluded=culprits,
            reason=f"{job.name} could not be started ({problem or 'Slurm names no node'})",
        )  # fmt: skip
        self._report(f"{job.name} (job {job_id}) was held and is released: {problem}")


def _build_dependency(
    job_name: str, newest: Mapping[str, Submission], stages: Sequence[StageJobs]
) -> str:
    """Build a resubmitted job's dependency; its script's own conditions have been met."""
    if job_name == CARETAKER_JOB:
        names = [name for stage in stages for name in stage.jobs if name in newest]
        ids = {name: newest[name].job_id for name in names}
        return build_caretaker_dependency(ids.pop(stages[-1].leader, ""), list(ids.values()))
    before = _find_leader_before(job_name, stages)
    return f"afterok:{newest[before].job_id}" if before else ""


def _find_leader_before(job_name: str, stages: Sequence[StageJobs]) -> str:
    """Find the leading job of the stage before a job's; empty if there is none."""
    leaders = (before.leader for before, stage in pairwise(stages) if job_name in stage.jobs)
    return next(leaders, "")


def run(config: dict[str, Any]) -> None:
    """Watch the run's jobs until this job ends, or in the waiting job until they are back."""
    caretaker_config = CaretakerConfig.model_validate(config)
    caretaker, poll_s = Caretaker(caretaker_config), caretaker_config.poll_s
    try:
        if caretaker_config.job == CARETAKER_JOB:
            while (outlook := caretaker.look()) == "unsettled":
                time.sleep(poll_s)
            if outlook == "at work":
                caretaker.submit_waiting_job()
            return
        while True:
            time.sleep(poll_s)
            caretaker.look()
    except SlurmNotFoundError as error:
        log.warning("the run's jobs cannot be watched from this node: %s", error)


def look_after_run(paths: RunPaths, report: Callable[[str], None], poll_s: float = POLL_S) -> None:
    """Watch a run's jobs from a login node until the run is finished, cancelled or given up.

    Raises:
        ClusterError: The run was not submitted, or there is no Slurm here.
    """
    try:
        (process,) = read_launch_file(paths.job(CARETAKER_JOB).launch).job.processes
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
