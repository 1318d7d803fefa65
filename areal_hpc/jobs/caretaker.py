"""Caretaker of a run's jobs under Slurm: submits again what is gone for good.

A job that ends too early asks Slurm for another start by itself. One whose node never started it,
or that Slurm ended before it could ask, cannot. Every job therefore has a caretaker, a process of
its first task: that of the leading job looks after all others, and while no leading job is there,
that of the first cell that runs looks after the leading one. A job that Slurm holds since a node
could not start it is released, and that node excluded.
"""

import contextlib
import logging
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmNotFoundError
from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.jobs.requeue import (
    MAX_EXCLUDED_NODES,
    build_exclude_list,
    release_jobs_held_while_idle,
)
from areal_hpc.jobs.succession import was_probably_cancelled_by_person
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.jobs import (
    LaunchFile,
    SlurmLaunchInfo,
    Submission,
    TaskExit,
    add_excluded_node,
    get_latest_submissions,
    list_unexpired_excluded_nodes,
    list_waiting_successors,
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
from areal_hpc.slurm.resubmit import submit_job_again
from areal_hpc.slurm.run_jobs import is_job_of_run, list_unrecorded_live_jobs
from areal_hpc.slurm.states import UNKNOWN_STATE, JobPhase, JobState

log = logging.getLogger(__name__)

POLL_S = 60.0
"""Between two looks. What is missing at two of them is gone: it may be submitting itself."""
MAX_SUBMISSIONS_WITHOUT_PROGRESS = 3
"""Of one job without progress of the run; the next one is held until a person releases it."""
MAX_JOB_LIFETIME_TO_BLAME_NODE_S = 60.0
"""A job without a word of any task that lived this long has started; its node is not to blame."""
MAX_EXIT_FILE_DELAY_S = 30.0
"""For which a node may not see a file that another has written: storage caches folders."""
SUBMIT_TIMEOUT_S = 600.0


class CaretakerConfig(ProcessConfig):
    """Configuration of the caretaker of one job."""

    ENTRY = "areal_hpc.jobs.caretaker:run"
    ROLE = "agents"

    job: str
    """The job that this process is part of."""
    leader: str
    """The run's leading job."""
    others: tuple[str, ...]
    """All other jobs of the stage."""
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
    def reason_to_submit(self) -> str:
        """Why it is to be submitted again, to follow the job's name; empty if it is not."""
        is_decided = any(one.exit_code == 0 or one.gave_up for one in self.task_exits)
        if self.is_alive or is_decided or self.cancelled_by_person:
            return ""
        if self.submission is None:
            return "was never submitted"
        if self.slurm_record is not None and self.state.phase is JobPhase.UNKNOWN:
            return ""  # a newer Slurm has it, in a state that is not known here
        ended_at = (self.slurm_record and self.slurm_record.ended_or_latest_end_at) or 0.0
        if self.state.name == "COMPLETED" and time.time() - ended_at < MAX_EXIT_FILE_DELAY_S:
            return ""  # its tasks may have said that they are done
        return self.state.meaning

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


def select_jobs_to_watch(config: CaretakerConfig, jobs: Mapping[str, JobStatus]) -> tuple[str, ...]:
    """Names of the jobs that the caretaker of `config.job` has to look after now."""
    if config.job == config.leader:
        return config.others
    leader = jobs[config.leader]
    if leader.is_alive and not leader.is_held_after_failed_launch:
        return ()
    first = next((name for name in config.others if jobs[name].is_running), "")
    return (config.leader,) if first == config.job else ()


class Caretaker:
    """Looks at the run's jobs now and then, and submits what is missing."""

    def __init__(self, config: CaretakerConfig) -> None:
        self._config = config
        self._paths = RunPaths(config.run_dir)
        self._queue = QueuePoller()
        self._events = EventLog(self._paths.events, "caretaker")
        self._missing: set[str] = set()
        """Jobs that were missing at the last look."""
        self._refused: dict[str, str] = {}
        """What Slurm said of the jobs that it did not take."""

    def resubmit_missing_and_release_leader(self) -> None:
        """Submit the jobs that were missing at the last look and are missing still.

        Raises:
            SlurmNotFoundError: Slurm's commands are not installed here.
        """
        if self._paths.cancelled_marker.exists() or self._paths.finished_marker.exists():
            return
        try:
            jobs = self._read_watched_statuses()
            charges = [jobs[name] for name in select_jobs_to_watch(self._config, jobs)]
            missing = [job for job in charges if job.reason_to_submit]
            if missing and self._is_launcher_at_work():
                return
            for job in missing:
                if job.name in self._missing:
                    self._submit_again_or_note_refusal(job)
            self._missing = {job.name for job in missing}
            for job in charges:
                if job.is_held_after_failed_launch:
                    self._release_after_failed_launch(job)
            self._release_leader_held_while_idle(jobs)
        except SlurmNotFoundError:
            raise
        except (ClusterError, OSError) as error:
            log.warning("the run's jobs cannot be looked after now: %s", error)

    def _is_launcher_at_work(self) -> bool:
        with contextlib.suppress(OSError):  # of storage without locks that reach other nodes
            return is_lock_held(self._paths.lock)
        return False

    def _release_leader_held_while_idle(self, jobs: Mapping[str, JobStatus]) -> None:
        leader = jobs[self._config.leader]
        is_waiting = leader.is_alive and not leader.is_running
        if is_waiting and self._config.job != self._config.leader:
            release_jobs_held_while_idle(self._paths.jobs_dir, only_job=self._config.leader)

    def _read_watched_statuses(self) -> dict[str, JobStatus]:
        """Statuses of all jobs; of the leading one alone for a cell, as long as that one lives.

        Of a thousand cells each looks once a minute.
        """
        leader, others = self._config.leader, self._config.others
        if self._config.job != leader:
            jobs = self._read_job_statuses([leader])
            if jobs[leader].is_alive and not jobs[leader].is_held_after_failed_launch:
                return jobs
        return self._read_job_statuses([leader, *others])

    def _read_job_statuses(self, names: Sequence[str]) -> dict[str, JobStatus]:
        submissions = read_submissions(self._paths.submissions)
        latest = get_latest_submissions(submissions)
        newest = {name: latest[name] for name in names if name in latest}
        # A job that has a successor is not missing, even before that one has started.
        chains = {
            name: [one, *list_waiting_successors(submissions, name)] for name, one in newest.items()
        }
        ids = [one.job_id for chain in chains.values() for one in chain]
        is_own = partial(is_job_of_run, self._paths)
        snapshot = self._queue.poll(ids).filter_jobs(ids, is_own)
        if snapshot.outage:
            raise ClusterError(snapshot.outage)
        alive = {
            name
            for name, chain in chains.items()
            if any(is_live_state(snapshot.get_state(one.job_id)) for one in chain)
        }
        if not alive.issuperset(names):  # Slurm is asked once where nothing is missing
            alive |= self._find_jobs_alive_under_other_ids(submissions)
        return {
            name: self._read_status_and_note_cancellation(
                name, newest.get(name), snapshot.jobs, name in alive
            )
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
        recorded = {one.job for one in submissions if one.job_id in at_work and not one.successor}
        return recorded | {
            one.submission.job for one in list_unrecorded_live_jobs(self._paths, queued)
        }

    def _read_status_and_note_cancellation(
        self,
        job_name: str,
        submission: Submission | None,
        queued_jobs: Mapping[str, SlurmJobRecord],
        is_alive: bool,
    ) -> JobStatus:
        if submission is None:
            return JobStatus(job_name, None, None, (), is_alive)
        found = queued_jobs.get(submission.job_id)
        exits = read_task_exits(self._paths.job(job_name)).values()
        own = tuple(one for one in exits if one.incarnation.rpartition(".")[0] == submission.job_id)
        by_person = self._check_and_note_if_cancelled_by_person(submission, found)
        return JobStatus(job_name, submission, found, own, is_alive, by_person)

    def _check_and_note_if_cancelled_by_person(
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

    def _submit_again_or_note_refusal(self, job: JobStatus) -> None:
        """Submit a job; one that Slurm does not take keeps no other one from being submitted."""
        try:
            self._submit_again(job)
        except SlurmCommandError as refusal:
            log.warning("%s", refusal)
            reason = refusal.problems[0].message
            if self._refused.get(job.name) != reason:  # once, though it is asked every minute
                self._refused[job.name] = reason
                self._events.record(SUBMISSION_REFUSED_EVENT, job=job.name, reason=reason)
        except OSError as error:
            log.warning("%s cannot be submitted again now: %s", job.name, error)

    def _submit_again(self, job: JobStatus) -> None:
        files = self._paths.job(job.name)
        launch = _read_launch_file(files)
        if launch.slurm is None:
            return
        caretaker = f"the caretaker of {self._config.job} on {socket.gethostname()}"
        with claim(self._paths.submission_claim, caretaker) as claimant:
            newest = get_latest_submissions(read_submissions(self._paths.submissions))
            if claimant or newest.get(job.name) != job.submission:
                return  # somebody else submits it, or has done so since this look
            if job.faulty_node:
                reason = f"{job.name} ended there before its first task started"
                self._exclude_node(launch.slurm, job, job.faulty_node, reason)
            made_bytes = _read_progress_bytes(launch.slurm.progress)
            count = _count_submissions_without_progress(files, made_bytes) + 1
            is_held = count > MAX_SUBMISSIONS_WITHOUT_PROGRESS
            # On a full disk nothing would bound the submissions: this raises then.
            _write_submission_count(files, count - 1, made_bytes)
            submitted = submit_job_again(
                launch.slurm,
                job.name,
                _build_exclude_options(files, launch.slurm),
                timeout_s=SUBMIT_TIMEOUT_S,
                hold=is_held,
            )
            self._events.record(
                "job_submitted_again", job=job.name, job_id=submitted, by=self._config.job,
                reason=f"{job.name} {job.reason_to_submit}",
                is_held=is_held, excluded=job.faulty_node,
            )  # fmt: skip
            # Not before: what Slurm did not take was no try of the job.
            _write_submission_count(files, count, made_bytes)
        log.warning("%s %s; submitted again as job %s", job.name, job.reason_to_submit, submitted)

    def _release_after_failed_launch(self, job: JobStatus) -> None:
        assert job.submission is not None
        files, job_id = self._paths.job(job.name), job.submission.job_id
        slurm = _read_launch_file(files).slurm
        if slurm is None:
            return
        made_bytes = _read_progress_bytes(slurm.progress)
        count = _count_submissions_without_progress(files, made_bytes) + 1
        if count > MAX_SUBMISSIONS_WITHOUT_PROGRESS:
            return
        starts = [start for start in self._queue.read_accounting([job_id]) if start.nodes]
        nodes = expand_node_list(starts[-1].nodes) if starts else []
        reasons = scontrol.read_reasons_of_drained_nodes(nodes) if nodes else {}
        culprits = list(reasons) or (nodes if len(nodes) == 1 else [])
        problem = "; ".join(f"{node}: {reasons.get(node, 'the start failed')}" for node in culprits)
        for node in culprits:
            self._exclude_node(slurm, job, node, problem)
        _write_submission_count(files, count - 1, made_bytes)  # on a full disk this raises
        if culprits:
            excluded = build_exclude_list(slurm, scontrol.query_job(job_id).excluded_nodes)
            scontrol.update_waiting_job(job_id, "ExcNodeList", excluded)
        scontrol.control_job("release", job_id)
        _write_submission_count(files, count, made_bytes)
        self._events.record(
            "job_released", job=job.name, job_id=job_id, by=self._config.job, excluded=culprits,
            reason=f"{job.name} could not be started ({problem or 'Slurm names no node'})",
        )  # fmt: skip
        log.warning("%s (job %s) was held and is released: %s", job.name, job_id, problem)

    def _exclude_node(self, slurm: SlurmLaunchInfo, job: JobStatus, node: str, reason: str) -> None:
        path = Path(slurm.excluded_nodes)
        known = list_unexpired_excluded_nodes(path)
        if node in known or len(known) >= MAX_EXCLUDED_NODES:
            return
        assert job.submission is not None
        add_excluded_node(path, node, reason, job.submission.job_id)


def _read_launch_file(job: JobPaths) -> LaunchFile:
    return msgspec.json.decode(job.launch.read_bytes(), type=LaunchFile)


def _read_progress_bytes(progress: str) -> int:
    with contextlib.suppress(OSError):
        return Path(progress).stat().st_size if progress else 0
    return 0


def _count_submissions_without_progress(job: JobPaths, progress_bytes: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        before = msgspec.json.decode(
            job.caretaker_submission_count.read_bytes(), type=dict[str, int]
        )
        return before["submissions"] if before["progress_bytes"] == progress_bytes else 0
    return 0


def _write_submission_count(job: JobPaths, count: int, made_bytes: int) -> None:
    content = {"submissions": count, "progress_bytes": made_bytes}
    write_atomic(job.caretaker_submission_count, msgspec.json.encode(content))


def _build_exclude_options(job: JobPaths, slurm: SlurmLaunchInfo) -> list[str]:
    own = re.findall(r"^#SBATCH --exclude=(\S+)", job.script.read_text(), re.MULTILINE)
    excluded = build_exclude_list(slurm, ",".join(own))
    return [f"--exclude={excluded}"] if excluded else []


def run(config: dict[str, Any]) -> None:
    """Look after the run's jobs until this job ends."""
    told = CaretakerConfig.model_validate(config)
    caretaker = Caretaker(told)
    while True:
        time.sleep(told.poll_s)
        try:
            caretaker.resubmit_missing_and_release_leader()
        except SlurmNotFoundError as error:
            log.warning("nobody looks after the run's jobs from here: %s", error)
            return
