"""Slurm pending reasons explained, with advice.

The reasons are those of squeue(1), "JOB REASON CODES". There are some two hundred; whole families
of limits share a sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason for waiting, for people."""

    meaning: str
    """To follow "waits:"."""
    hint: str = ""
    """What to try; empty where waiting is all there is to do."""
    needs_action: bool = False
    """It will wait for ever unless somebody does something."""


_PATIENCE = "wait; areal-hpc status shows the start that Slurm expects"
_ADMINISTRATOR = "ask the administrators of the cluster"
_HELD = "scontrol release JOBID, or areal-hpc cancel RUN"

GAVE_NODES_BACK = Reason(
    "it had nothing to do, gave its nodes back, and comes back with the trainer"
)
"""Of a job that holds itself until there is work. Slurm only knows that it is held."""

_EXACT = {
    "None": Reason("Slurm has not looked at it yet", "wait a minute"),
    "Priority": Reason("other jobs come first", _PATIENCE),
    "Resources": Reason("its nodes are not free yet", _PATIENCE),
    "Dependency": Reason("a job that it depends on has not ended yet", _PATIENCE),
    "DependencyNeverSatisfied": Reason(
        "a job that it depends on failed",
        "areal-hpc why RUN names the failure; mend it and submit again",
        needs_action=True,
    ),
    "BeginTime": Reason(
        "its earliest start is still to come; after a requeue that is about two minutes", _PATIENCE
    ),
    "JobHeldUser": Reason("its user holds it", _HELD, needs_action=True),
    "JobHeldAdmin": Reason("an administrator holds it", _ADMINISTRATOR, needs_action=True),
    "JobArrayTaskLimit": Reason("as many members of its array run as may at once", _PATIENCE),
    "Licenses": Reason("its licenses are in use", _PATIENCE),
    "Reservation": Reason("its reservation has not begun", _PATIENCE),
    "ReservationDeleted": Reason(
        "its reservation was deleted", "submit again without it", needs_action=True
    ),
    "ReqNodeNotAvail": Reason(
        "nodes that it needs are down, drained or reserved (often for maintenance)",
        "sinfo -R and scontrol show reservation say why; a shorter time limit may fit before it",
    ),
    "NodeDown": Reason("a node that it needs is down", "sinfo -R says why"),
    "PartitionDown": Reason("its partition takes no work now", _ADMINISTRATOR),
    "PartitionInactive": Reason("its partition is inactive", _ADMINISTRATOR),
    "PartitionNodeLimit": Reason(
        "it asks for more nodes than its partition gives, or than are up",
        "ask for fewer nodes, or another partition",
        needs_action=True,
    ),
    "PartitionTimeLimit": Reason(
        "its time limit is longer than its partition allows",
        "ask for less time; a run goes on in the next job",
        needs_action=True,
    ),
    "BadConstraints": Reason(
        "no node can ever be what it asks for",
        "compare what it asks for with sinfo -o '%P %G %c %m %f'",
        needs_action=True,
    ),
    "InvalidAccount": Reason(
        "its account is not valid", "sacctmgr show assoc user=$USER lists yours", needs_action=True
    ),
    "AccountNotAllowed": Reason(
        "its partition does not take its account",
        "scontrol show partition names those it takes",
        needs_action=True,
    ),
    "InvalidQOS": Reason(
        "its QOS is not valid", "sacctmgr show assoc user=$USER lists yours", needs_action=True
    ),
    "QOSNotAllowed": Reason(
        "its partition or account does not take its QOS",
        "sacctmgr show assoc user=$USER lists yours",
        needs_action=True,
    ),
    "JobHoldMaxRequeue": Reason(
        "it was requeued so often that Slurm holds it", _HELD, needs_action=True
    ),
    "launch failed requeued held": Reason(
        "its last start failed on a node, and Slurm holds it",
        "look at that node with sinfo -R, exclude it, then scontrol release JOBID",
        needs_action=True,
    ),
    "job requeued in held state": Reason("it was requeued and is held", _HELD, needs_action=True),
    "Cleaning": Reason("its last run is still being cleaned up", _PATIENCE),
    "Prolog": Reason("the prolog runs on its nodes", "wait a minute"),
    "SystemFailure": Reason("Slurm or a file system of its failed", _ADMINISTRATOR),
    "JobLaunchFailure": Reason(
        "its start failed on a node", "sinfo -R may name the node; exclude it"
    ),
    "FrontEndDown": Reason("no front-end node is free", _ADMINISTRATOR),
    "TimeLimit": Reason("it used up its time limit"),
    "InactiveLimit": Reason("it was idle for longer than its partition allows"),
}


def _spelled(text: str) -> str:
    """Slurm writes a reason in several ways: `launch_failed_requeued_held`, or with blanks."""
    return re.sub(r"[^a-z]", "", text.lower())


_BY_SPELLING = {_spelled(name): reason for name, reason in _EXACT.items()}

_FAMILIES = (
    (
        r"nodesrequiredforjobaredown",
        Reason("nodes that it needs are down, drained or reserved", "sinfo -R says why"),
    ),
    (r"burstbuffer", Reason("the burst buffer is not ready", _PATIENCE)),
    (
        r"(qos|assoc|association).*(grp|group)|^grp",
        Reason(
            "your group uses all that its account or QOS may",
            "wait for its other jobs, or ask for less",
        ),
    ),
    (
        r"max.*(per(job|node|user|account)?|limit)|limit$",
        Reason(
            "it would exceed a limit of its user, account, QOS or partition",
            "wait for your other jobs, or ask for less: sacctmgr show qos lists the limits",
        ),
    ),
)


def explain_reason(text: str) -> Reason:
    """What a job waits for, from the reason that Slurm gives.

    A reason may carry more, after a comma (`ReqNodeNotAvail, UnavailableNodes:n07`) or in
    brackets, which is kept. One that is not known is passed on as it is.
    """
    name, _, rest = text.strip().strip("()").partition(",")
    found = _BY_SPELLING.get(_spelled(name))
    if found is None:
        spelled = _spelled(name)
        found = next((reason for form, reason in _FAMILIES if re.search(form, spelled)), None)
    if found is None:
        return Reason(f"Slurm's reason is {text.strip() or 'not given'}", "man squeue explains it")
    if rest.strip():
        return Reason(f"{found.meaning} ({rest.strip()})", found.hint, found.needs_action)
    return found
