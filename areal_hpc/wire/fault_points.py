"""Named points at which tests kill, hold or fail a process.

A call of `fault_point` does nothing unless the variable `AREAL_HPC_FAULTS` names its point; a
process reads it at the first point that it reaches. It holds faults, separated by spaces:

    POINT=ACTION        at every visit of this process
    POINT@N=ACTION      at its N-th visit, counted from 1

| action    | what happens                                                                        |
|-----------|-------------------------------------------------------------------------------------|
| kill      | the process kills itself with SIGKILL                                               |
| error     | OSError (EIO) is raised                                                             |
| hold:FILE | while FILE exists, the first process that reaches the point waits; it writes its    |
|           | process id to FILE.held. Other processes pass; without FILE all do.                 |

Example: `AREAL_HPC_FAULTS="checkpoint.before_rename@2=kill journal.before_append=hold:/tmp/gate"`.
"""

import errno
import os
import re
import signal
import threading
import time
from functools import cache
from pathlib import Path

FAULTS_VARIABLE = "AREAL_HPC_FAULTS"
MAX_HOLD_S = 300.0
"""Longest time that a process waits: a test that died leaves its file behind."""
_POLL_S = 0.02
_FAULT_PATTERN = re.compile(
    r"(?P<point>[a-z_.]+)(@(?P<visit>[1-9]\d*))?=(?P<action>kill|error|hold:.+)"
)

FAULT_POINTS = {
    "submit.before_record": "Slurm has a held job, and no file names it",
    "submit.before_release": "all jobs of a run are submitted and recorded, and held",
    "train.before_step": "a training step begins",
    "train.before_forward": "a micro-batch's forward pass begins",
    "train.after_step": "a training step is over",
    "optimizer.before_step": "gradients are computed, the optimizer has not stepped",
    "optimizer.after_step": "the optimizer has stepped",
    "checkpoint.before_copy": "the state is about to be copied for a checkpoint",
    "checkpoint.after_copy": "the state is copied, nothing of it is written",
    "checkpoint.while_writing": "a rank's part of a checkpoint is being written",
    "checkpoint.before_write": "a rank's part of a checkpoint is about to be written",
    "checkpoint.before_digests": "a rank's part of a checkpoint is written, its digests are not",
    "checkpoint.before_marker": "all data of a checkpoint is on disk, its marker is not",
    "checkpoint.before_rename": "a checkpoint is written but not visible",
    "checkpoint.after_rename": "a checkpoint is visible, the oldest one is not deleted",
    "checkpoint.after_write": "a checkpoint is visible and durable",
    "quarantine.before_write": "a batch is about to be quarantined, and no file says so",
    "quarantine.after_write": "the file of a quarantined batch is durable, no step consumed it",
    "quarantine.after_delete": "the file of a quarantined batch is gone, perhaps not durably",
    "weights.before_end": "replicas hold new weights half loaded",
    "proxy.generate": "a request for a reply is about to be sent to SGLang",
    "journal.before_append": "a record is about to be written to the journal",
    "shard.before_read": "columns of a shard are about to be read",
    "shard.before_index": "a shard is whole but not indexed",
}
"""Every point of the package, with the state there."""


Fault = tuple[str, int | None]
"""Action as in the variable, and the number of the visit at which it is due; None: at each."""


def parse_faults(text: str) -> dict[str, list[Fault]]:
    """Return the faults that the variable's text names, by point.

    Raises:
        ValueError: The text does not have the form above, or a point is unknown.
    """
    faults: dict[str, list[Fault]] = {}
    for word in text.split():
        match = _FAULT_PATTERN.fullmatch(word)
        if match is None or match["point"] not in FAULT_POINTS:
            raise ValueError(
                f"{FAULTS_VARIABLE} holds {word!r}; expected POINT[@N]=kill, error or hold:FILE, "
                f"with a point of {', '.join(FAULT_POINTS)}"
            )
        visit = int(match["visit"]) if match["visit"] else None
        faults.setdefault(match["point"], []).append((match["action"], visit))
    return faults


class FaultInjector:
    """Counter of visits that carries out the faults due at them. Safe for threads."""

    def __init__(self, faults: dict[str, list[Fault]]) -> None:
        self._faults = faults
        self._visits = dict.fromkeys(faults, 0)
        self._lock = threading.Lock()

    def trigger_due_faults(self, point: str) -> None:
        """Kill, hold or fail (by OSError) this process if a fault of the point is due."""
        if point not in self._faults:
            return
        with self._lock:
            self._visits[point] += 1
            visit = self._visits[point]
        for action, due_visit in self._faults[point]:
            if due_visit in (None, visit):
                _carry_out_action(point, action)


def fault_point(name: str) -> None:
    """Let a test kill, hold or fail the process here; otherwise do nothing.

    The package calls this once for each of `FAULT_POINTS`.
    """
    if (injector := _get_injector()) is not None:
        injector.trigger_due_faults(name)


@cache
def _get_injector() -> FaultInjector | None:
    faults = parse_faults(os.environ.get(FAULTS_VARIABLE, ""))
    return FaultInjector(faults) if faults else None


def _carry_out_action(point: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "error":
        raise OSError(errno.EIO, f"a fault at {point}")
    else:
        _hold_process(Path(action.removeprefix("hold:")))


def _hold_process(gate_file: Path) -> None:
    if not gate_file.exists():
        return
    try:
        with gate_file.with_name(f"{gate_file.name}.held").open("x") as stream:
            stream.write(str(os.getpid()))
    except FileExistsError:
        return
    give_up_at = time.monotonic() + MAX_HOLD_S
    while gate_file.exists() and time.monotonic() < give_up_at:
        time.sleep(_POLL_S)
