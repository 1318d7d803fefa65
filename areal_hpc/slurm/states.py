"""Vocabulary of Slurm 22.05 to 26.05: job states, reasons for waiting, errors in logs.

States are those of `job_state_string` in `src/common/slurm_protocol_defs.c`, with the meanings of
squeue(1), "JOB STATE CODES". Reasons are those of `job_reason_string` there, from 24.05 on of the
table in `src/common/job_state_reason.c`: some two hundred, so families of limits share a sentence.
Comments name the releases of words that not all releases have.

Everything else that this package uses of Slurm is the same in all releases. One difference needs no
code: from 24.05 on Slurm itself requeues a preempted job that ends at the warning (`GRACE_PREEMPT`
of its job_mgr.c), even if its work is done; the job then ends again as it starts.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class JobPhase(StrEnum):
    """Phase of a job's life, which comprises several of Slurm's states."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    """Slurm stops its processes; its nodes are not free yet."""
    OVER = "over"
    UNKNOWN = "unknown"
    """Slurm does not answer, or does not list the job."""


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job and its meaning."""

    name: str
    """Slurm's name of the state, without additions."""
    phase: JobPhase
    meaning: str
    """Predicate of a sentence that begins with "the job"."""

    @property
    def is_cancelled(self) -> bool:
        return self.name == "CANCELLED"

    @property
    def is_over_without_success(self) -> bool:
        return self.phase is JobPhase.OVER and self.name != "COMPLETED"


_STATE_MEANINGS_BY_PHASE = {
    JobPhase.WAITING: {
        "PENDING": "waits in the queue",
        "REQUEUED": "was put back into the queue",
        "REQUEUE_FED": "was put back into the queue of its federation",
        "REQUEUE_HOLD": "was requeued and is held until released",
        "SPECIAL_EXIT": "was put back into the queue in a special state and is held until it is "
        "released",
        # from 25.11
        "EXPEDITING": "was put back into the queue, ahead of others, and starts when it may",
        "RESV_DEL_HOLD": "is held because its reservation was deleted",
        "CONFIGURING": "has its nodes, which are being made ready",
    },
    JobPhase.RUNNING: {
        "RUNNING": "runs",
        "RESIZING": "runs and is about to change its size",
        "SIGNALING": "runs and is being sent a signal",
        "SUSPENDED": "is suspended: it keeps its nodes and does nothing",
        "STOPPED": "is stopped (SIGSTOP): it keeps its nodes and CPUs",
    },
    JobPhase.ENDING: {
        "COMPLETING": "is being cleaned up on its nodes",
        "STAGE_OUT": "copies its files out of the burst buffer",
    },
    JobPhase.OVER: {
        "COMPLETED": "ended by itself with exit code 0",
        "CANCELLED": "was cancelled",
        "FAILED": "ended with an error",
        "TIMEOUT": "was ended at its time limit",
        "DEADLINE": "was ended at its deadline",
        "OUT_OF_MEMORY": "used more memory than it had asked for",
        "PREEMPTED": "was ended for a job of higher priority",
        "NODE_FAIL": "lost a node",
        "BOOT_FAIL": "got a node that did not boot",
        "REVOKED": "runs on another cluster of the federation",
    },
}
STATE_BY_NAME = {
    name: JobState(name, phase, meaning)
    for phase, meanings in _STATE_MEANINGS_BY_PHASE.items()
    for name, meaning in meanings.items()
}
"""Every state that Slurm's commands print, by its name."""

UNKNOWN_STATE = JobState("UNKNOWN", JobPhase.UNKNOWN, "is unknown")


def parse_canceller(text: str) -> int | None:
    match = re.search(r"^CANCELLED by ([0-9]+)", text)
    return int(match[1]) if match else None


def parse_state(text: str) -> JobState:
    """Parse a state that a command of Slurm printed.

    Commands add the user who cancelled the job (`CANCELLED by 1000`), further flags
    (`PENDING,REQUEUED`), or `+` if a column was too narrow (`OUT_OF_ME+`). An unknown word keeps
    its name and has the phase UNKNOWN.
    """
    word = re.split(r"[\s,]", text.strip(), maxsplit=1)[0].upper()
    if word in STATE_BY_NAME:
        return STATE_BY_NAME[word]
    if word.endswith("+"):
        stem = word.rstrip("+")
        states = [state for name, state in STATE_BY_NAME.items() if stem and name.startswith(stem)]
        if len(states) == 1:
            return states[0]
    meaning = f"is in a state that is not known here: {text.strip() or 'none'}"
    return JobState(word or UNKNOWN_STATE.name, JobPhase.UNKNOWN, meaning)


@dataclass(frozen=True, slots=True)
class PendingReasonExplanation:
    """Explanation of a reason for waiting."""

    meaning: str
    """Text that follows "waits:"."""
    hint: str = ""
    """One way out; empty if there is nothing to do but to wait."""
    needs_action: bool = False
    """Whether the job waits for ever unless a person acts."""


_WAIT_HINT = "wait; `areal-hpc status` shows the start time that Slurm expects"
_ADMINISTRATOR_HINT = "ask the administrators of the cluster"
_RELEASE_HINT = "scontrol release JOBID, or areal-hpc cancel RUN"

_TRANSIENT_REASONS = {
    "None": ("Slurm has not looked at it yet", "wait a minute"),
    "Priority": ("jobs of higher priority are ahead", _WAIT_HINT),
    "Resources": ("waiting for free nodes", _WAIT_HINT),
    "Dependency": ("a job that it depends on has not ended yet", _WAIT_HINT),
    "BeginTime": (
        "its earliest start is still to come; after a requeue that is about two minutes",
        _WAIT_HINT,
    ),
    "JobArrayTaskLimit": ("as many members of its array run as may at once", _WAIT_HINT),
    "Licenses": ("its licenses are in use", _WAIT_HINT),
    "Reservation": ("its reservation has not begun", _WAIT_HINT),
    "ReqNodeNotAvail": (
        "nodes that it needs are down, drained or reserved (often for maintenance)",
        "sinfo -R and scontrol show reservation say why; a shorter time limit may fit before it",
    ),
    "NodeDown": ("a node that it needs is down", "sinfo -R says why"),
    "PartitionDown": ("its partition takes no work now", _ADMINISTRATOR_HINT),
    "PartitionInactive": ("its partition is inactive", _ADMINISTRATOR_HINT),
    "Cleaning": ("its last run is still being cleaned up", _WAIT_HINT),
    "Prolog": ("the prolog runs on its nodes", "wait a minute"),
    "SystemFailure": ("Slurm or a file system of its failed", _ADMINISTRATOR_HINT),
    "JobLaunchFailure": ("its start failed on a node", "sinfo -R may name the node; exclude it"),
    "FrontEndDown": ("no front-end node is free", _ADMINISTRATOR_HINT),  # to 24.11
    "PowerNotAvail": ("there is no power for its nodes", _WAIT_HINT),  # to 23.11
    "PowerReserved": ("the power that its nodes need is reserved", _WAIT_HINT),  # to 23.11
    "MaxPoweredUpNodes": ("as many nodes are powered up as may be", _WAIT_HINT),  # from 24.05
    "MpiPortsBusy": ("the ports that its MPI needs are taken", _WAIT_HINT),  # from 24.05
    "NvidiaImexChannels": ("no channel of NVLink's IMEX is free", _WAIT_HINT),  # from 25.11
    "FedJobLock": ("the clusters of its federation decide which of them starts it", _WAIT_HINT),
    "SchedDefer": ("it was to start at once or not at all, and could not", "submit it again"),
    "QOSUsageThreshold": ("its QOS has been used too much of late", _WAIT_HINT),
    "AccountingPolicy": ("a limit of its account, QOS or user is reached", _WAIT_HINT),
    "TimeLimit": ("it used up its time limit", ""),
    "InactiveLimit": ("it was idle for longer than its partition allows", ""),
    # Reasons that squeue gives for the end of a job.
    "NonZeroExitCode": ("it ended with an error", ""),
    "RaisedSignal": ("a signal ended it", ""),  # from 23.02
    "OutOfMemory": ("it ran out of memory", ""),
    "DeadLine": ("its deadline has passed", ""),
}
LAUNCH_FAILED_REASON = "launch failed requeued held"
"""Reason of a job that a node could not start because its prolog, often a health check, failed."""
INVALID_DEPENDENCY_REASON = "DependencyNeverSatisfied"
_STUCK_REASONS = {
    INVALID_DEPENDENCY_REASON: (
        "a job that it depends on failed",
        "areal-hpc why RUN names the failure; fix it and submit again",
    ),
    "JobHeldUser": ("its user holds it", _RELEASE_HINT),
    "JobHeldAdmin": ("an administrator holds it", _ADMINISTRATOR_HINT),
    "ReservationDeleted": ("its reservation was deleted", "submit again without it"),
    "ReservationInvalid": ("its reservation is not valid", "submit again without it"),  # from 23.02
    "PartitionConfig": (
        "it asks for what its partition does not allow",
        "compare it with scontrol show partition",
    ),
    "Constraints": (  # from 23.11
        "no node has the features that it asks for",
        "sinfo -o '%P %f' lists those that nodes have",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than its partition gives, or than are up",
        "ask for fewer nodes, or another partition",
    ),
    "PartitionTimeLimit": (
        "its time limit is longer than its partition allows",
        "request less time; the run continues in the next job",
    ),
    "BadConstraints": (
        "no node of the cluster can satisfy the request",
        "compare what it asks for with sinfo -o '%P %G %c %m %f'",
    ),
    "InvalidAccount": ("its account is not valid", "sacctmgr show assoc user=$USER lists yours"),
    "AccountNotAllowed": (
        "its partition does not take its account",
        "scontrol show partition names those it takes",
    ),
    "InvalidQOS": ("its QOS is not valid", "sacctmgr show assoc user=$USER lists yours"),
    "QOSNotAllowed": (
        "its partition or account does not take its QOS",
        "sacctmgr show assoc user=$USER lists yours",
    ),
    "JobHoldMaxRequeue": ("it was requeued so often that Slurm holds it", _RELEASE_HINT),
    LAUNCH_FAILED_REASON: (
        "its last start failed on a node, and Slurm holds it",
        "look at that node with sinfo -R, exclude it, then scontrol release JOBID",
    ),
    "job requeued in held state": ("it was requeued and is held", _RELEASE_HINT),
}
"""Reasons that last until a person acts."""


def is_held_after_failed_launch(reason: str) -> bool:
    return _normalize_spelling(reason) == _normalize_spelling(LAUNCH_FAILED_REASON)


def _normalize_spelling(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower())


_REASON_BY_SPELLING = {
    _normalize_spelling(name): PendingReasonExplanation(*reason, needs_action)
    for table, needs_action in ((_TRANSIENT_REASONS, False), (_STUCK_REASONS, True))
    for name, reason in table.items()
}

_REASON_BY_PATTERN = {
    r"nodesrequiredforjobaredown": PendingReasonExplanation(
        "nodes that it needs are down, drained or reserved",
        "sinfo -R says why",
    ),
    r"burstbuffer": PendingReasonExplanation("the burst buffer is not ready", _WAIT_HINT),
    r"(qos|assoc|association).*(grp|group)|^grp": PendingReasonExplanation(
        "your group uses all that its account or QOS may",
        "wait for its other jobs, or ask for less",
    ),
    # The job alone exceeds these limits, so the end of other jobs does not help.
    r"max.*per(job|node)|maxmemperlimit|^qosmin": PendingReasonExplanation(
        "it asks for more, or less, than its account, QOS or partition lets one job have",
        "ask for what it may have (sacctmgr show qos lists the limits), or for another QOS",
        needs_action=True,
    ),
    r"max.*(per(user|account)?|limit)|limit$": PendingReasonExplanation(
        "it would exceed a limit of its user, account, QOS or partition",
        "wait for your other jobs, or ask for less: sacctmgr show qos lists the limits",
    ),
}
"""Patterns of reasons that share an explanation."""


_HELD_BY_USER_SPELLINGS = frozenset(
    map(_normalize_spelling, ("JobHeldUser", "job requeued in held state"))
)
"""Spellings of the reasons of jobs that a user submits or requeues held."""


def is_held_by_user(reason: str) -> bool:
    return _normalize_spelling(reason) in _HELD_BY_USER_SPELLINGS


def explain_reason(text: str) -> PendingReasonExplanation:
    """Explain the reason that Slurm gives for a waiting job.

    Details after a comma (`ReqNodeNotAvail, UnavailableNodes:n07`) or in brackets are kept. An
    unknown reason is quoted.
    """
    name, _, rest = text.strip().strip("()").partition(",")
    spelled = _normalize_spelling(name)
    families = (reason for form, reason in _REASON_BY_PATTERN.items() if re.search(form, spelled))
    explanation = _REASON_BY_SPELLING.get(spelled) or next(families, None)
    if explanation is None:
        return PendingReasonExplanation(
            f"Slurm's reason is {text.strip() or 'not given'}", "man squeue explains it"
        )
    if rest.strip():
        return PendingReasonExplanation(
            f"{explanation.meaning} ({rest.strip()})", explanation.hint, explanation.needs_action
        )
    return explanation


PROVEN_RELEASES = ("22.05", "24.11", "26.05")
"""Releases on which the tests run, in devclusters: those of Debian 12, Debian 13 and sid."""

UNPROVEN = "pyxis, enroot and memory limits of cgroup v2"
"""Features that need a cluster that no test has."""

_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
_ERROR_LINE_PATTERN = re.compile(
    # Up to 24.11, and srun in all: `slurmstepd-n01: error: *** STEP 1.0 ON n01 CANCELLED AT ...`
    r"(?:slurmstepd|srun|slurmd)(?:-\w+)?: (?:error|\S+: error)"
    # slurmstepd from 25.05: `[2026-11-29T08:21:13.243] error: *** STEP 1.0 ON n01 CANCELLED ...`,
    # whose time has the default form of slurm.conf's LogTimeFormat.
    rf"|\[{_TIME}[^\]]*\] error: "
)
_ERROR_TIME_PATTERN = re.compile(rf" AT ({_TIME})|^\[({_TIME})")


def parse_release(version: str) -> str:
    match = re.search(r"\b\d\d\.\d\d(?=\.|\b)", version)
    return match[0] if match else ""


def describe_proof(version: str) -> str:
    """Describe what the tests prove on a version that Slurm printed."""
    release = parse_release(version)
    if release in PROVEN_RELEASES:
        return f"{release}: the tests run on it; on none of them ran {UNPROVEN}"
    tested = ", ".join(PROVEN_RELEASES)
    if PROVEN_RELEASES[0] < release < PROVEN_RELEASES[-1]:
        return f"{release}: not tested itself, but {tested} are; on none of them ran {UNPROVEN}"
    return f"outside of what is tested: {tested}"


def is_release_covered(version: str) -> bool:
    return PROVEN_RELEASES[0] <= parse_release(version) <= PROVEN_RELEASES[-1]


def parse_exit_status(text: str) -> tuple[int, int]:
    """Parse the exit code and signal in squeue's column `exit_code`; zeros if it is empty."""
    code, colon, signal = text.partition(":")
    if not code.isdigit():
        return 0, 0
    if colon:  # from 23.02: `1:0`
        return int(code), int(signal) if signal.isdigit() else 0
    return int(code) >> 8 & 0xFF, int(code) & 0x7F  # 22.05: the status of wait(2), `256`


def is_slurm_error_line(line: str) -> bool:
    return _ERROR_LINE_PATTERN.match(line) is not None


def find_error_time(line: str) -> float | None:
    match = _ERROR_TIME_PATTERN.search(line)
    return datetime.fromisoformat(match[1] or match[2]).timestamp() if match else None
