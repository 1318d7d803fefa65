"""Slurm job states: waiting, running, ending or over.

Names and meanings are those of squeue(1), "JOB STATE CODES", and of sacct(1); reasons for waiting
are in `reasons.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class JobPhase(StrEnum):
    """Phase of a job's life, under which Slurm has several states."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    """Its processes are being stopped; nodes are not free yet."""
    OVER = "over"
    UNKNOWN = "unknown"
    """Slurm does not answer, or does not know the job."""


class RequeueBehavior(StrEnum):
    """Will the same job id run again without anybody's doing?"""

    YES = "yes"
    NO = "no"
    PERHAPS = "perhaps"
    """If it was submitted to be requeued, or if somebody lets it."""


@dataclass(frozen=True, slots=True)
class JobState:
    """One state and what it means."""

    name: str
    """Slurm's word, without what it may add to it."""
    phase: JobPhase
    comes_back: RequeueBehavior
    is_failure: bool
    meaning: str
    """For people, to follow "the job"."""


def _over(name: str, meaning: str, comes_back: RequeueBehavior = RequeueBehavior.NO) -> JobState:
    return JobState(name, JobPhase.OVER, comes_back, is_failure=True, meaning=meaning)


def _alive(name: str, phase: JobPhase, meaning: str) -> JobState:
    comes_back = RequeueBehavior.PERHAPS if phase is JobPhase.ENDING else RequeueBehavior.YES
    return JobState(name, phase, comes_back, is_failure=False, meaning=meaning)


_STATES = (
    _alive("PENDING", JobPhase.WAITING, "waits in the queue"),
    _alive("REQUEUED", JobPhase.WAITING, "was put back into the queue"),
    _alive("REQUEUE_FED", JobPhase.WAITING, "was put back into the queue of its federation"),
    JobState(
        "REQUEUE_HOLD",
        JobPhase.WAITING,
        RequeueBehavior.PERHAPS,
        is_failure=False,
        meaning="was requeued and is held until released",
    ),
    JobState(
        "SPECIAL_EXIT",
        JobPhase.WAITING,
        RequeueBehavior.PERHAPS,
        is_failure=False,
        meaning="was put back into the queue in a special state and is held until it is released",
    ),
    JobState(
        "RESV_DEL_HOLD",
        JobPhase.WAITING,
        RequeueBehavior.PERHAPS,
        is_failure=False,
        meaning="is held because its reservation was deleted",
    ),
    _alive("CONFIGURING", JobPhase.WAITING, "has its nodes, which are being made ready"),
    _alive("RUNNING", JobPhase.RUNNING, "runs"),
    _alive("RESIZING", JobPhase.RUNNING, "runs and is about to change its size"),
    _alive("SIGNALING", JobPhase.RUNNING, "runs and is being sent a signal"),
    _alive("SUSPENDED", JobPhase.RUNNING, "is suspended: it keeps its nodes and does nothing"),
    _alive("STOPPED", JobPhase.RUNNING, "is stopped (SIGSTOP): it keeps its nodes and processors"),
    _alive("COMPLETING", JobPhase.ENDING, "is being cleaned up on its nodes"),
    _alive("STAGE_OUT", JobPhase.ENDING, "copies its files out of the burst buffer"),
    JobState(
        "COMPLETED",
        JobPhase.OVER,
        RequeueBehavior.NO,
        is_failure=False,
        meaning="ended by itself with exit code 0",
    ),
    _over("CANCELLED", "was cancelled"),
    _over("FAILED", "ended with an error"),
    _over("TIMEOUT", "was ended at its time limit"),
    _over("DEADLINE", "was ended at its deadline"),
    _over("OUT_OF_MEMORY", "used more memory than it had asked for"),
    _over("PREEMPTED", "was ended for a job of higher priority", RequeueBehavior.PERHAPS),
    _over("NODE_FAIL", "lost a node", RequeueBehavior.PERHAPS),
    _over("BOOT_FAIL", "got a node that did not boot", RequeueBehavior.PERHAPS),
    _over("REVOKED", "runs on another cluster of the federation"),
)
STATES = {state.name: state for state in _STATES}
"""Every state that Slurm documents, by its name."""

UNKNOWN = JobState(
    "UNKNOWN", JobPhase.UNKNOWN, RequeueBehavior.PERHAPS, is_failure=False, meaning="is unknown"
)


def parse_state(text: str) -> JobState:
    """The state behind what a command of Slurm printed.

    Commands add to a state who cancelled the job (`CANCELLED by 1000`), further flags
    (`PENDING,REQUEUED`), or `+` where a column was too narrow (`OUT_OF_ME+`). A word that no
    version of Slurm known to us uses keeps its name and is of no known phase.
    """
    word = re.split(r"[\s,]", text.strip(), maxsplit=1)[0].upper()
    if word in STATES:
        return STATES[word]
    if word.endswith("+"):
        stem = word.rstrip("+")
        found = [state for name, state in STATES.items() if stem and name.startswith(stem)]
        if len(found) == 1:
            return found[0]
    return JobState(
        word or UNKNOWN.name,
        JobPhase.UNKNOWN,
        RequeueBehavior.PERHAPS,
        is_failure=False,
        meaning=f"is in a state that is not known here: {text.strip() or 'none'}",
    )
