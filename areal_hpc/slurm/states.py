"""Slurm job states: waiting, running, ending or over.

Names are those of `job_state_string` in Slurm's `src/common/slurm_protocol_defs.c`, releases 22.05
to 26.05, meanings those of squeue(1), "JOB STATE CODES"; reasons for waiting are in `reasons.py`.
"""

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


@dataclass(frozen=True, slots=True)
class JobState:
    """One state and what it means."""

    name: str
    """Slurm's word, without what it may add to it."""
    phase: JobPhase
    meaning: str
    """For people, to follow "the job"."""

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
    found = re.search(r"^CANCELLED by ([0-9]+)", text)
    return int(found[1]) if found else None


def parse_state(text: str) -> JobState:
    """The state behind what a command of Slurm printed.

    Commands add to a state who cancelled the job (`CANCELLED by 1000`), further flags
    (`PENDING,REQUEUED`), or `+` where a column was too narrow (`OUT_OF_ME+`). A word that no
    version of Slurm known to us uses keeps its name and is of no known phase.
    """
    word = re.split(r"[\s,]", text.strip(), maxsplit=1)[0].upper()
    if word in STATE_BY_NAME:
        return STATE_BY_NAME[word]
    if word.endswith("+"):
        stem = word.rstrip("+")
        found = [state for name, state in STATE_BY_NAME.items() if stem and name.startswith(stem)]
        if len(found) == 1:
            return found[0]
    meaning = f"is in a state that is not known here: {text.strip() or 'none'}"
    return JobState(word or UNKNOWN_STATE.name, JobPhase.UNKNOWN, meaning)
