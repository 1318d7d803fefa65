"""Task of a job under Slurm, for its supervisor: node probe, stop notes, requeue.

The first task acts for the job: it numbers the start, watches the clock, and requeues. The other
tasks follow notes in the job's folder.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.jobs import starts
from areal_hpc.jobs.node import (
    TaskPosition,
    find_own_address,
    get_slurm_restart_count,
)
from areal_hpc.jobs.node_probe import (
    NodeProblem,
    ReachabilityServer,
    is_fault_of_storage,
    probe_node,
)
from areal_hpc.jobs.requeue import (
    MAX_EXCLUDED_NODES,
    PAUSES_BEFORE_WRITING_AGAIN_S,
    StartProgressTracker,
    cancel_own_job,
    exclude_nodes,
    requeue_own_job,
)
from areal_hpc.jobs.restarts import (
    MAX_TIME_LIMIT_STOPS,
    TIME_LIMIT_REASON,
    FailuresWithoutProgress,
    decide_restart,
)
from areal_hpc.jobs.task_processes import build_start_environment
from areal_hpc.rundir.files import RunDirWatch, log_storage_errors
from areal_hpc.rundir.jobs import (
    STOPPED_EXIT_CODE,
    LaunchFile,
    SlurmLaunchInfo,
    TaskExit,
    is_cancelled,
    list_unexpired_excluded_nodes,
    read_task_exit,
    write_task_exit,
)
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.scontrol import expand_node_list

log = logging.getLogger(__name__)

MAX_CHECKPOINT_DURATION_S = 3600.0
"""Time before the limit from which on the duration of the last checkpoint is read."""
STOP_POLL_S, RARE_STOP_POLL_S = 2.0, 6.0
"""Time between two looks at the shared storage: for stop notes, and for the end of the run."""
DONE_GRACE_S = 30.0
"""Time for processes to end by themselves once the work is done."""
TASK_EXIT_TIMEOUT_S = 60.0
"""Longest wait for the exit of a task that does not report it."""
PREEMPTED_REASON = "preempted by a job of higher priority"
REQUEUE_TIMEOUT_S = 1800.0
"""Longest time for which a job keeps its nodes to requeue while slurmctld does not answer."""
PREEMPTION_KILL_TIMEOUT_S = 300.0
"""Longest wait of a task for its kill, if only a kill makes Slurm start the job again."""


class SlurmTask:
    def __init__(
        self, launch: LaunchFile, slurm: SlurmLaunchInfo, position: TaskPosition, events: EventLog
    ) -> None:
        self._launch = launch
        self._slurm = slurm
        self._position = position
        self._events = events
        self._job_id = os.environ["SLURM_JOB_ID"]
        self._node = os.environ["SLURMD_NODENAME"]
        self.incarnation = f"{self._job_id}.{get_slurm_restart_count(os.environ)}"
        self._paths = launch.paths
        self._starts_dir = self._paths.starts_dir
        self._start: starts.JobStart | None = None
        self._absent: list[TaskExit] = []
        self._progress_tracker = StartProgressTracker(self._paths, slurm.progress)
        self._clock: starts.SlurmControllerClock | None = None
        """Clock of the first task, which watches the time limit."""
        self._ends_at: float | None = None
        self._next_look_at = self._next_rare_look_at = 0.0
        self._done_since: float | None = None
        self._is_first_reached = position.is_first
        """Whether this node reached the first task, which answers only when a start begins."""
        self._is_superseded = self._is_preempted = self._ends_cancelled = False
        self._run_dir_watch = RunDirWatch(launch.run.root)
        self._kill_at = time.monotonic() + launch.stop_grace_s

    def begin(self) -> TaskExit | None:
        """Join this start of the job and probe the node; return an exit if the task cannot work."""
        environ, position = os.environ, self._position
        nodes = int(environ.get("SLURM_NNODES", "1"))
        try:
            if position.is_first:
                self._start = self._publish_start(environ, nodes)
            else:
                self._start = starts.await_start(
                    self._starts_dir, self.incarnation, self._node, self._slurm.join_timeout_s
                )
                if not position.local_rank:
                    starts.report_node_joined(self._starts_dir, self._start, position.node_rank)
        except (ClusterError, OSError) as error:
            problem = NodeProblem(str(error), is_fault_of_node=not is_fault_of_storage(error))
            return self._report_node_problems(self._node, [problem])
        if self._slurm.done_marker and Path(self._slurm.done_marker).exists():
            return TaskExit(0, reason="there is no work left")
        if position.local_rank:
            return None  # another task of this node probes it
        if (refusal := self.probe_node()) is not None:
            return refusal
        if position.is_first and nodes > 1:
            return self._await_nodes(self._start, expand_node_list(environ["SLURM_JOB_NODELIST"]))
        return None

    def probe_node(self) -> TaskExit | None:
        """Check the health of this node; return an exit if the task cannot work on it."""
        assert self._start is not None
        first_address = "" if self._is_first_reached else self._start.address
        findings = probe_node(
            os.environ, self._paths.root, self._slurm.least_free_bytes, first_address
        )
        if findings:
            return self._report_node_problems(self._node, findings)
        self._is_first_reached = True
        return None

    def _publish_start(self, environ: Mapping[str, str], nodes: int) -> starts.JobStart:
        address = ""
        if nodes > 1:
            greeter = ReachabilityServer(find_own_address(self._slurm.interface, environ))
            greeter.start_answering(self._slurm.join_timeout_s)
            address = greeter.address
        start = starts.claim_next_start(self._starts_dir, self.incarnation, self._node, address)
        self._clock = starts.SlurmControllerClock()
        self._ends_at = starts.find_end_time(environ)
        return start

    def _await_nodes(self, start: starts.JobStart, nodes: list[str]) -> TaskExit | None:
        timeout_s = self._slurm.join_timeout_s
        absent = starts.await_absent_nodes(self._starts_dir, start, len(nodes), timeout_s)
        reason = (
            f"no task on this node joined within {timeout_s:.0f} s; "
            f"is {self._paths.root} mounted there?"
        )
        # If most nodes are absent it is more likely the first node that is cut off.
        finding = NodeProblem(reason, is_fault_of_node=2 * len(absent) <= len(nodes))
        self._absent = [self._report_node_problems(nodes[rank], [finding]) for rank in absent]
        return self._absent[0] if self._absent else None

    def _report_node_problems(self, node: str, findings: list[NodeProblem]) -> TaskExit:
        excluded: list[str] = []
        with log_storage_errors("the list of excluded nodes", logging.ERROR):
            excluded = list_unexpired_excluded_nodes(self._launch.run.excluded_nodes)
        is_fault_of_node = (
            all(finding.is_fault_of_node for finding in findings)
            and len(excluded) < MAX_EXCLUDED_NODES
        )
        reason = "; ".join(finding.reason for finding in findings)
        self._events.record("node_check_failed", node=node, reason=reason)
        log.error("node %s failed its health check: %s", node, reason)
        return TaskExit(
            ClusterError.exit_code,
            "probe",
            f"{node}: {reason}",
            faulty_node=node if is_fault_of_node else "",
        )

    def build_environment(self) -> Mapping[str, str]:
        assert self._start is not None
        return build_start_environment(
            self._paths, self._slurm.interface, self._start.number, self._stop_note_path
        )

    @property
    def _stop_note_path(self) -> Path:
        assert self._start is not None
        return starts.get_stop_note_path(self._starts_dir, self._start)

    @property
    def _first_task_done_path(self) -> Path:
        return self._stop_note_path.with_suffix(".left")

    def find_stop_reason(self, *, can_end_job: bool) -> TaskExit | None:
        """Return an exit if this task has to stop now; None while it may go on.

        A process whose end ends the job (`can_end_job`) is not stopped when another task is done.
        """
        now = time.monotonic()
        if now < self._next_look_at or self._start is None:
            return None
        self._next_look_at = now + STOP_POLL_S
        reason: TaskExit | None = None
        with log_storage_errors():
            reason = self._find_stop_condition(self._start, now, can_end_job=can_end_job)
        return reason

    def _find_stop_condition(
        self, start: starts.JobStart, now: float, *, can_end_job: bool
    ) -> TaskExit | None:
        if starts.is_superseded(self._starts_dir, start):
            self._is_superseded = True
            return TaskExit(STOPPED_EXIT_CODE, reason="superseded by a later start of this job")
        if now >= self._next_rare_look_at or self._run_dir_watch.is_missing:
            self._next_rare_look_at = now + RARE_STOP_POLL_S
            if self._run_dir_watch.is_gone():
                return TaskExit(STOPPED_EXIT_CODE, reason=self._describe_gone_run_dir())
            is_done = bool(self._slurm.done_marker) and Path(self._slurm.done_marker).exists()
            self._done_since = (self._done_since or now) if is_done else None
            if self._done_since is not None and now - self._done_since >= DONE_GRACE_S:
                return TaskExit(0, reason="there is no work left")
        note = starts.read_stop_note(self._stop_note_path)
        if note and not (note.exit_code == 0 and can_end_job):
            return TaskExit(0 if note.exit_code == 0 else STOPPED_EXIT_CODE, reason=note.reason)
        if self._clock is not None and self._ends_at is not None:
            # Time for the step in flight, for the requeue and Slurm's coarse clock, and for a save.
            left_s = self._ends_at - self._clock.now()
            left_s -= self._launch.stop_grace_s + self._slurm.margin_s
            if left_s <= MAX_CHECKPOINT_DURATION_S and (
                left_s <= starts.read_checkpoint_duration_s(self._paths)
            ):
                return TaskExit(STOPPED_EXIT_CODE, reason=TIME_LIMIT_REASON)
        return None

    def announce_stop(self, outcome: TaskExit) -> float:
        """Notify the other tasks; return the grace of this task's processes in seconds."""
        grace_s = self._launch.stop_grace_s
        if self._start is None or self._is_superseded:
            return grace_s
        if self._position.is_first:
            grace_s = self._query_grace_s(outcome)
        try:
            earlier_note = starts.read_stop_note(self._stop_note_path)
            if earlier_note is not None and not self._position.is_first:
                grace_s = earlier_note.grace_s
            else:
                note = starts.StopNote(outcome.reason, outcome.exit_code, grace_s)
                starts.write_stop_note(self._stop_note_path, note)
        except OSError as error:
            log.warning("could not notify the other tasks: %s", error)
        self._kill_at = time.monotonic() + grace_s
        return grace_s

    def _query_grace_s(self, outcome: TaskExit) -> float:
        """Return the launch's grace, less if Slurm ends the job sooner, more if there is time.

        During a preemption the job's end is the end of its grace.
        """
        began, grace_s = time.monotonic(), self._launch.stop_grace_s
        if outcome.exit_code != STOPPED_EXIT_CODE:
            return grace_s
        wanted_s = grace_s + starts.read_checkpoint_duration_s(self._paths)
        try:
            facts = scontrol.query_job(self._job_id)
        except ClusterError:
            return max(0.0, grace_s - (time.monotonic() - began))
        self._is_preempted = facts.is_preempted
        if facts.state != scontrol.RUNNING_STATE or self._clock is None:
            return grace_s  # Slurm kills the job after KillWait, which it does not report
        if facts.ends_at is None:
            return wanted_s  # without a time limit nothing ends it sooner
        return max(0.0, min(wanted_s, facts.ends_at - self._clock.now() - self._slurm.margin_s))

    def conclude(self, outcome: TaskExit) -> TaskExit:
        """Record how this task ended; in the first task, wait for the others and end the job.

        The others stay until the first task has called Slurm: the end of any task may end the job.
        """
        outcome = msgspec.structs.replace(outcome, incarnation=self.incarnation)
        if self._is_superseded:
            return outcome  # the files belong to the later start
        if outcome.exit_code and self._is_run_dir_gone():
            # Another start could not be counted: a person moves the folder back, or resumes there.
            log.error("%s", reason := self._describe_gone_run_dir())
            if not self._position.is_first:
                time.sleep(TASK_EXIT_TIMEOUT_S)  # the end of one task may end the job
            return msgspec.structs.replace(outcome, reason=reason)
        rank, is_written = self._position.rank, False
        with log_storage_errors("the task's exit status", logging.ERROR):
            write_task_exit(self._paths, rank, outcome)
            is_written = True
        if self._position.is_first:
            outcome = self._end_job(outcome)
            with log_storage_errors("the job's exit status", logging.ERROR):
                write_task_exit(self._paths, rank, outcome)
                if self._start is not None:
                    self._first_task_done_path.touch()
            if self._ends_cancelled:
                cancel_own_job(self._job_id)  # last, as it kills this process, too
        elif outcome.exit_code and self._start is not None:
            # On a full disk the first task waits for room to count this start.
            self._await_first_task(
                TASK_EXIT_TIMEOUT_S + (0.0 if is_written else sum(PAUSES_BEFORE_WRITING_AGAIN_S))
            )
        return outcome

    def _is_run_dir_gone(self) -> bool:
        try:
            return self._run_dir_watch.is_gone(looks=1)
        except OSError:
            return False

    def _describe_gone_run_dir(self) -> str:
        return (
            f"the run's folder {self._launch.run.root} is gone: it was moved or removed; "
            "areal-hpc resume goes on at its new place, or after moving it back"
        )

    def _await_first_task(self, exit_timeout_s: float) -> None:
        began = time.monotonic()

        def need_not_wait() -> bool:
            if self._first_task_done_path.exists():
                return True
            has_first_ended = read_task_exit(self._paths, 0, self.incarnation) is not None
            limit_s = REQUEUE_TIMEOUT_S if has_first_ended else exit_timeout_s
            return time.monotonic() - began > limit_s

        _await_condition(need_not_wait, began + REQUEUE_TIMEOUT_S)

    def _end_job(self, own_exit: TaskExit) -> TaskExit:
        # Only Slurm is needed to go on, so errors of the storage are passed over. On a full disk a
        # crash waits, as nothing would bound the starts.
        gathered = self._wait_for_task_exits(own_exit)
        outcomes = [*gathered.values(), *self._absent]
        faulty: list[str] = []
        with log_storage_errors("the list of excluded nodes", logging.ERROR):
            reasons = {end.faulty_node: end.reason for end in outcomes if end.faulty_node}
            faulty = exclude_nodes(self._launch.run, reasons, self._job_id)
        counts = self._progress_tracker.update_failure_counts(
            outcomes, waits_for_room=not self._is_preempted
        )
        decision = decide_restart(outcomes, counts)
        crashes = [end for end in outcomes if end.exit_code not in (0, STOPPED_EXIT_CODE)]
        stopped = [end for end in outcomes if end.exit_code == STOPPED_EXIT_CODE]
        decisive = next(iter(crashes), stopped[0] if own_exit.is_crash and stopped else own_exit)
        if self._is_preempted and not crashes:
            decisive = msgspec.structs.replace(decisive, reason=PREEMPTED_REASON)
        if decision == "done":
            return own_exit
        if decision == "fail":
            decisive = _explain_end(decisive, counts)
            self._events.record(
                "job_failed",
                job_id=self._job_id,
                reason=decisive.reason,
                failures_without_progress=counts.failures,
            )
            return msgspec.structs.replace(decisive, gave_up=True)
        if decision == "idle":
            self._events.record("job_idle", job_id=self._job_id, node=self._node)
            return decisive
        # At the time limit Slurm ends the job and so this loop.
        give_up_at = time.monotonic() + REQUEUE_TIMEOUT_S
        requeue_result = requeue_own_job(
            self._launch.run, self._slurm.excluded_by_recipe, give_up_at
        )
        self._events.record(
            f"job_{requeue_result.replace(' ', '_')}", job_id=self._job_id, node=self._node,
            reason=decisive.cause, excluded=faulty,
        )  # fmt: skip
        self._ends_cancelled = requeue_result == "cancelled"
        if requeue_result == "not requeued" and not crashes and self._may_be_requeueable():
            # A preempted job that cannot requeue itself: Slurm requeues jobs that still run when
            # the grace is over. Others end at once and a caretaker submits them: until then they
            # count against a limit of jobs.
            _await_condition(
                lambda: is_cancelled(self._launch.run.cancelled_marker),
                time.monotonic() + PREEMPTION_KILL_TIMEOUT_S,
            )
        return msgspec.structs.replace(decisive, reason=f"{decisive.reason} ({requeue_result})")

    def _may_be_requeueable(self) -> bool:
        try:
            return scontrol.query_job(self._job_id).is_requeueable
        except ClusterError:
            return True

    def _wait_for_task_exits(self, own_exit: TaskExit) -> dict[int, TaskExit]:
        exits: dict[int, TaskExit] = {self._position.rank: own_exit}
        timeout_s = TASK_EXIT_TIMEOUT_S if own_exit.exit_code == 0 else self._slurm.margin_s / 2
        give_up_at = max(self._kill_at, time.monotonic()) + timeout_s

        def have_all_ended() -> bool:
            for rank in set(range(self._launch.job.tasks)) - exits.keys():
                outcome = read_task_exit(self._paths, rank, self.incarnation)
                if outcome is not None:
                    exits[rank] = outcome
            return len(exits) == self._launch.job.tasks

        _await_condition(have_all_ended, give_up_at)
        return dict(sorted(exits.items()))


def _explain_end(decisive: TaskExit, counts: FailuresWithoutProgress) -> TaskExit:
    """Return the exit of a job that gives up, with the reason why it does."""
    if counts.unwritten_because and decisive.is_crash:
        reason = f"{decisive.cause}; it cannot be counted: {counts.unwritten_because}"
        return msgspec.structs.replace(decisive, reason=reason, says_why=True)
    if decisive.exit_code != STOPPED_EXIT_CODE or counts.time_limit_stops < MAX_TIME_LIMIT_STOPS:
        return decisive
    reason = (
        f"{counts.time_limit_stops} starts in a row reached the time limit before the run made "
        "progress; the limit is too short"
    )
    code = RecipeError.exit_code
    return msgspec.structs.replace(decisive, exit_code=code, reason=reason, says_why=True)


def _await_condition(condition: Callable[[], bool], give_up_at: float) -> None:
    while not _check_condition(condition) and time.monotonic() < give_up_at:
        time.sleep(0.5)


def _check_condition(condition: Callable[[], bool]) -> bool:
    is_true = False
    with log_storage_errors():
        is_true = condition()
    return is_true
